/* Preloaded into the worker by system_calls.py: makes one call on a file of the torture's folder fail.

   A file that both have mapped says which: the countdown-th call from now on. What it was is written there.

   With the error STOP no call fails. The worker stops before or after the call, until it is killed. Calls that only
   look are not counted then. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define STOP -1

struct control {
    _Atomic int countdown; /* 0: no call fails any more */
    int error;             /* what it is answered with, or STOP */
    int does;              /* it is done all the same, where it changes names; with STOP: the worker stops after it */
    char only[32];         /* calls of this name alone are counted; empty: all */
    char call[32];         /* which call has failed; empty: none has */
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
    return control && control->error == STOP && (strstr(call, "stat") || (strstr(call, "open") && !(flags & O_CREAT)));
}

static int fails(const char *call, int fd, const char *path) {
    if (!control || atomic_load(&control->countdown) <= 0)
        return 0;
    if (control->only[0] && strcmp(control->only, call))
        return 0;
    int saved = errno;
    int is = is_in_folder(fd, path) && atomic_fetch_sub(&control->countdown, 1) == 1;
    errno = saved;
    if (is && control->error == STOP) {
        if (!control->does)
            stop(call);
        stops_after = call;
        return 0;
    }
    if (is)
        strncpy(control->call, call, sizeof control->call - 1);
    return is;
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
