/* Makes calls of a process fail. system_calls.py preloads it into workers, each_call.py into trainers, too.

   A control file, which the torture maps too, names the call: the countdown-th one from now on. The library writes the
   name of the call that failed there.

   With the error STOP no call fails. The worker stops before or after the call, until it is killed. Calls that only
   look are not counted then. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

#define STOP -1

struct control {
    _Atomic int countdown; /* 0: no call fails any more */
    int error;             /* what it is answered with, or STOP */
    int does;              /* it is done all the same, where it changes names; with STOP: the worker stops after it */
    char only[32];         /* calls of this name alone are counted; empty: all */
    char call[32];         /* which call has failed; empty: none has */
    int forever;           /* all counted calls after it fail, too */
    int everywhere;        /* calls on sockets, memory and other files are counted, too */
    int memory;            /* allocations are counted in the place of calls */
};

static struct control *control;
static const char *folder;
static __thread const char *stops_after;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ASYNCCKPT_TORTURE_CALLS");
    folder = getenv("ASYNCCKPT_TORTURE_CALLS_IN");
    int fd = path && folder ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        control = at;
}

static int is_in_folder(int fd, const char *path) {
    if (path && path[0] == '/')
        return strstr(path, folder) != NULL;
    if (fd < 0)
        return 0;
    char link[64], target[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t nbytes = readlink(link, target, sizeof target - 1);
    if (nbytes < 0)
        return 0;
    target[nbytes] = 0;
    return strstr(target, folder) != NULL;
}

static void stop(const char *call) {
    strncpy(control->call, call, sizeof control->call - 1);
    for (;;)
        pause();
}

static int only_looks(const char *call, int flags) {
    static const char *const looks[] = {"stat", "read", "access", "flock"};
    if (!control || control->error != STOP)
        return 0;
    for (size_t each = 0; each < sizeof looks / sizeof *looks; each++)
        if (strstr(call, looks[each]))
            return 1;
    return strstr(call, "open") && !(flags & O_CREAT);
}

static int fails(const char *call, int fd, const char *path) {
    if (!control || control->memory || atomic_load(&control->countdown) <= 0)
        return 0;
    if (control->only[0] && strcmp(control->only, call))
        return 0;
    if (control->error == EAGAIN && (!strcmp(call, "read") || !strncmp(call, "pread", 5)))
        return 0; /* a file never says that, and Python reads None then */
    if (control->error == EAGAIN && control->forever && !strcmp(call, "flock"))
        return 0; /* another process has the lock, and is waited for as long as locks are */
    int saved = errno;
    int is = 0;
    if (control->everywhere ? fd > 2 || path || fd < 0 : is_in_folder(fd, path)) {
        int left = control->forever ? atomic_load(&control->countdown) : 0;
        if (left != 1)
            left = atomic_fetch_sub(&control->countdown, 1);
        is = left == 1;
    }
    errno = saved;
    if (is && control->error == STOP) {
        if (!control->does)
            stop(call);
        stops_after = call;
        return 0;
    }
    if (is && !control->call[0])
        strncpy(control->call, call, sizeof control->call - 1);
    return is;
}

/* Of a call that has to do with memory, a socket or a new descriptor: never in the folder. */
static int fails_elsewhere(const char *call) {
    return control && control->everywhere && fails(call, -1, NULL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The real call. */
#define CALLED(type, name, arguments) \
    type answer = REAL(name) arguments; \
    if (stops_after) \
        stop(stops_after); \
    return answer;

/* A call that changes nothing that could be seen where it fails. */
#define REFUSED(type, name, parameters, arguments, fd, path) \
    type name parameters { \
        if (!only_looks(#name, 0) && fails(#name, fd, path)) { \
            errno = control->error; \
            return -1; \
        } \
        CALLED(type, name, arguments) \
    }

/* A call that may have been done although it is answered with an error. */
#define DONE(type, name, parameters, arguments, fd, path) \
    type name parameters { \
        if (!only_looks(#name, 0) && fails(#name, fd, path)) { \
            if (control->does) \
                REAL(name) arguments; \
            errno = control->error; \
            return -1; \
        } \
        CALLED(type, name, arguments) \
    }

#define OPENS(name, parameters, arguments, fd) \
    int name parameters { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (!only_looks(#name, flags) && fails(#name, fd, path)) { \
            errno = control->error; \
            return -1; \
        } \
        CALLED(int, name, arguments) \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)
OPENS(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)

REFUSED(ssize_t, write, (int fd, const void *data, size_t nbytes), (fd, data, nbytes), fd, NULL)
REFUSED(ssize_t, pwrite, (int fd, const void *data, size_t nbytes, off_t at), (fd, data, nbytes, at), fd, NULL)
REFUSED(ssize_t, pwrite64, (int fd, const void *data, size_t nbytes, off64_t at), (fd, data, nbytes, at), fd, NULL)
REFUSED(int, fsync, (int fd), (fd), fd, NULL)
REFUSED(int, fdatasync, (int fd), (fd), fd, NULL)
REFUSED(int, ftruncate, (int fd, off_t nbytes), (fd, nbytes), fd, NULL)
REFUSED(int, ftruncate64, (int fd, off64_t nbytes), (fd, nbytes), fd, NULL)
REFUSED(int, stat, (const char *path, struct stat *facts), (path, facts), AT_FDCWD, path)
REFUSED(int, stat64, (const char *path, struct stat64 *facts), (path, facts), AT_FDCWD, path)
REFUSED(int, lstat, (const char *path, struct stat *facts), (path, facts), AT_FDCWD, path)
REFUSED(int, lstat64, (const char *path, struct stat64 *facts), (path, facts), AT_FDCWD, path)
REFUSED(int, fstatat, (int fd, const char *path, struct stat *facts, int flags), (fd, path, facts, flags), fd, path)
REFUSED(int, fstatat64, (int fd, const char *path, struct stat64 *facts, int flags), (fd, path, facts, flags), fd, path)

DONE(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
DONE(int, mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode), fd, path)
DONE(int, unlink, (const char *path), (path), AT_FDCWD, path)
DONE(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), fd, path)
DONE(int, rmdir, (const char *path), (path), AT_FDCWD, path)
DONE(int, rename, (const char *from, const char *to), (from, to), AT_FDCWD, to)
DONE(int, renameat, (int fd, const char *from, int other, const char *to), (fd, from, other, to), other, to)
DONE(int, renameat2, (int fd, const char *from, int other, const char *to, unsigned flags), (fd, from, other, to, flags), other, to)

DONE(int, link, (const char *from, const char *to), (from, to), AT_FDCWD, to)
DONE(int, linkat, (int fd, const char *from, int other, const char *to, int flags), (fd, from, other, to, flags), other, to)
DONE(int, symlink, (const char *target, const char *path), (target, path), AT_FDCWD, path)
DONE(int, chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
DONE(int, fchmod, (int fd, mode_t mode), (fd, mode), fd, NULL)
DONE(int, flock, (int fd, int how), (fd, how), fd, NULL)

REFUSED(ssize_t, read, (int fd, void *data, size_t nbytes), (fd, data, nbytes), fd, NULL)
REFUSED(ssize_t, pread, (int fd, void *data, size_t nbytes, off_t at), (fd, data, nbytes, at), fd, NULL)
REFUSED(ssize_t, pread64, (int fd, void *data, size_t nbytes, off64_t at), (fd, data, nbytes, at), fd, NULL)
REFUSED(int, fstat, (int fd, struct stat *facts), (fd, facts), fd, NULL)
REFUSED(int, fstat64, (int fd, struct stat64 *facts), (fd, facts), fd, NULL)
REFUSED(int, statvfs64, (const char *path, struct statvfs64 *facts), (path, facts), AT_FDCWD, path)
REFUSED(int, fstatvfs64, (int fd, struct statvfs64 *facts), (fd, facts), fd, NULL)
REFUSED(int, posix_fallocate64, (int fd, off64_t at, off64_t nbytes), (fd, at, nbytes), fd, NULL)
REFUSED(int, fallocate64, (int fd, int mode, off64_t at, off64_t nbytes), (fd, mode, at, nbytes), fd, NULL)
REFUSED(int, access, (const char *path, int mode), (path, mode), AT_FDCWD, path)

#define NO_DIRECTORY(name, parameters, arguments, fd, path) \
    DIR *name parameters { \
        if (!only_looks(#name, 0) && fails(#name, fd, path)) { \
            errno = control->error; \
            return NULL; \
        } \
        return REAL(name) arguments; \
    }

NO_DIRECTORY(opendir, (const char *path), (path), AT_FDCWD, path)
NO_DIRECTORY(fdopendir, (int fd), (fd), fd, NULL)

#define ELSEWHERE(type, name, parameters, arguments, failure) \
    type name parameters { \
        if (fails_elsewhere(#name)) { \
            errno = control->error; \
            return failure; \
        } \
        return REAL(name) arguments; \
    }

ELSEWHERE(int, memfd_create, (const char *name, unsigned flags), (name, flags), -1)
/* Anonymous memory is the interpreter's: threading.Thread.start waits for ever if the new thread has none. */
#define MAPS(name, offset) \
    void *name(void *at, size_t nbytes, int protection, int flags, int fd, offset from) { \
        if (fd >= 0 && fails_elsewhere(#name)) { \
            errno = control->error; \
            return MAP_FAILED; \
        } \
        return REAL(name)(at, nbytes, protection, flags, fd, from); \
    }

MAPS(mmap, off_t)
MAPS(mmap64, off64_t)
ELSEWHERE(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1)
ELSEWHERE(int, socketpair, (int domain, int type, int protocol, int ends[2]), (domain, type, protocol, ends), -1)
ELSEWHERE(int, connect, (int fd, const struct sockaddr *to, socklen_t nbytes), (fd, to, nbytes), -1)
ELSEWHERE(int, bind, (int fd, const struct sockaddr *to, socklen_t nbytes), (fd, to, nbytes), -1)
ELSEWHERE(int, listen, (int fd, int backlog), (fd, backlog), -1)
ELSEWHERE(int, accept4, (int fd, struct sockaddr *from, socklen_t *nbytes, int flags), (fd, from, nbytes, flags), -1)
ELSEWHERE(ssize_t, send, (int fd, const void *data, size_t nbytes, int flags), (fd, data, nbytes, flags), -1)
ELSEWHERE(ssize_t, recv, (int fd, void *data, size_t nbytes, int flags), (fd, data, nbytes, flags), -1)
ELSEWHERE(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags), -1)
ELSEWHERE(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), -1)
ELSEWHERE(int, poll, (struct pollfd *fds, nfds_t count, int timeout), (fds, count, timeout), -1)
ELSEWHERE(int, pipe2, (int ends[2], int flags), (ends, flags), -1)

/* With PYTHONMALLOC=malloc each object of Python is one of these. */
static int has_no_memory(void) {
    if (!control || !control->memory || atomic_load(&control->countdown) <= 0)
        return 0;
    if (atomic_fetch_sub(&control->countdown, 1) != 1)
        return 0;
    strncpy(control->call, "malloc", sizeof control->call - 1);
    errno = ENOMEM;
    return 1;
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *malloc(size_t nbytes) { return has_no_memory() ? NULL : __libc_malloc(nbytes); }
void *calloc(size_t count, size_t nbytes) { return has_no_memory() ? NULL : __libc_calloc(count, nbytes); }
void *realloc(void *old, size_t nbytes) { return has_no_memory() ? NULL : __libc_realloc(old, nbytes); }
