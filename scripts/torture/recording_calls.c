/* Preloaded into trainers and workers by recorded_calls.py: records each call that changes a folder, or makes it durable.

   All processes have the log mapped. A lock in the log is held during each call that changes the folder, so the order of
   the records is the order of the changes. It is not held during fsync: that has one record before and one after, and
   covers what is recorded before the first, in crashes after the second. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* As in recorded_calls.py. */
enum kind { NONE, CREATE, LINK, UNLINK, RENAME, EXCHANGE, WRITE, SIZE, SYNC, SYNCED, MARK, UNKNOWN };

struct log {
    uint64_t used;   /* bytes after this struct */
    uint64_t nbytes; /* room for them */
    uint64_t lost;   /* records for which there was no room */
    uint64_t is_ready;
    union {
        pthread_mutex_t lock;
        char room[96];
    };
};

struct record {
    uint32_t kind;
    uint32_t name, other, data;  /* lengths of the bytes that follow */
    int64_t folder, into;        /* inodes of the folders of both names */
    int64_t file;                /* inode */
    int64_t number;              /* offset, size, type, or the place of the SYNC of a SYNCED */
};

static struct log *log_;
static char *bytes;
static const char *root;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ASYNCCKPT_TORTURE_LOG");
    root = getenv("ASYNCCKPT_TORTURE_LOG_OF");
    int fd = path && root ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    struct stat facts;
    if (fd < 0 || fstat(fd, &facts))
        return;
    void *at = mmap(NULL, facts.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return;
    struct log *found = at;
    uint64_t fresh = 0;
    if (__atomic_compare_exchange_n(&found->is_ready, &fresh, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&found->lock, &kind);
        found->nbytes = facts.st_size - sizeof *found;
        __atomic_store_n(&found->is_ready, 2, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&found->is_ready, __ATOMIC_SEQ_CST) != 2)
        usleep(100);
    bytes = (char *)(found + 1);
    log_ = found;
}

static void lock(void) {
    if (pthread_mutex_lock(&log_->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&log_->lock);
}

static void unlock(void) { pthread_mutex_unlock(&log_->lock); }

/* The caller holds the lock. Returns the place of the record. */
static uint64_t append(struct record its, const char *name, const char *other, const void *data) {
    uint64_t at = log_->used, nbytes = sizeof its + its.name + its.other + its.data;
    if (at + nbytes > log_->nbytes) {
        log_->lost++;
        return at;
    }
    char *to = bytes + at;
    to = mempcpy(to, &its, sizeof its);
    to = mempcpy(to, name, its.name);
    to = mempcpy(to, other, its.other);
    memcpy(to, data, its.data);
    log_->used = at + nbytes;
    return at;
}

static void say(enum kind kind, const char *text) {
    struct record its = {.kind = kind, .name = strlen(text)};
    lock();
    append(its, text, "", "");
    unlock();
}

void asyncckpt_torture_mark(const char *text) {
    if (log_)
        say(MARK, text);
}

/* Whether an open file or folder is below the root. */
static int is_in_root(int fd) {
    char link[64], target[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t nbytes = readlink(link, target, sizeof target - 1);
    if (nbytes < 0)
        return 0;
    target[nbytes] = 0;
    size_t length = strlen(root);
    return !strncmp(target, root, length) && (target[length] == '/' || target[length] == 0);
}

struct name {
    char text[PATH_MAX];
    uint32_t length;
    int64_t folder; /* 0: not below the root */
    int64_t file;   /* 0: there is none */
    int64_t nbytes;
};

static struct name look(int fd, const char *path) {
    struct name its = {.length = 0};
    char above[PATH_MAX];
    if (!path || strlen(path) >= sizeof above)
        return its;
    strcpy(above, path);
    for (size_t end = strlen(above); end > 1 && above[end - 1] == '/'; end--)
        above[end - 1] = 0;
    char *slash = strrchr(above, '/');
    strcpy(its.text, slash ? slash + 1 : above);
    its.length = strlen(its.text);
    if (slash)
        slash[slash == above] = 0;
    else
        strcpy(above, ".");
    int folder = (int)syscall(SYS_openat, fd, above, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return its;
    struct stat facts;
    if (is_in_root(folder) && !fstat(folder, &facts)) {
        its.folder = facts.st_ino;
        if (!fstatat(folder, its.text, &facts, AT_SYMLINK_NOFOLLOW)) {
            its.file = facts.st_ino;
            its.nbytes = facts.st_size;
        }
    }
    syscall(SYS_close, folder);
    return its;
}

static int64_t inode_of(int fd, int64_t *nbytes) {
    struct stat facts;
    if (!log_ || fstat(fd, &facts) || !(S_ISREG(facts.st_mode) || S_ISDIR(facts.st_mode)) || !is_in_root(fd))
        return 0;
    if (nbytes)
        *nbytes = facts.st_size;
    return facts.st_ino;
}

#define REAL(NAME) ((__typeof__(&NAME))dlsym(RTLD_NEXT, #NAME))

/* Do a call that may create a name, and record that. */
#define CREATES(RESULT, CALL, DIR, PATH, TYPE, TARGET) \
    do { \
        if (!log_) \
            return CALL; \
        int before_ = errno; \
        lock(); \
        struct name was = look(DIR, PATH); \
        errno = before_; \
        RESULT = CALL; \
        int after = errno; \
        if (RESULT >= 0 && was.folder && !was.file) { \
            struct name is = look(DIR, PATH); \
            struct record its = {.kind = CREATE, .name = is.length, .data = strlen(TARGET), .folder = is.folder}; \
            its.file = is.file; \
            its.number = TYPE; \
            append(its, is.text, "", TARGET); \
        } else if (RESULT >= 0 && was.folder && TYPE == 'f' && (truncates)) { \
            struct record its = {.kind = SIZE}; \
            its.file = inode_of(RESULT, NULL); \
            append(its, "", "", ""); \
        } \
        unlock(); \
        errno = after; \
    } while (0)

#define OPENS(NAME, PARAMETERS, ARGUMENTS, DIR) \
    int NAME PARAMETERS { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int truncates = flags & O_TRUNC, opened; \
        if (!(flags & (O_CREAT | O_TRUNC))) \
            return REAL(NAME) ARGUMENTS; \
        CREATES(opened, REAL(NAME) ARGUMENTS, DIR, path, 'f', ""); \
        return opened; \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)
OPENS(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), fd)

#define MAKES(NAME, PARAMETERS, ARGUMENTS, DIR, PATH, TYPE, TARGET) \
    int NAME PARAMETERS { \
        int done; \
        const int truncates = 0; \
        CREATES(done, REAL(NAME) ARGUMENTS, DIR, PATH, TYPE, TARGET); \
        return done; \
    }

MAKES(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 'd', "")
MAKES(mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode), fd, path, 'd', "")
MAKES(symlink, (const char *target, const char *path), (target, path), AT_FDCWD, path, 'l', target)
MAKES(symlinkat, (const char *target, int fd, const char *path), (target, fd, path), fd, path, 'l', target)

#define REMOVES(NAME, PARAMETERS, ARGUMENTS, DIR) \
    int NAME PARAMETERS { \
        if (!log_) \
            return REAL(NAME) ARGUMENTS; \
        lock(); \
        struct name was = look(DIR, path); \
        int done = REAL(NAME) ARGUMENTS, after = errno; \
        if (done == 0 && was.folder) { \
            struct record its = {.kind = UNLINK, .name = was.length, .folder = was.folder, .file = was.file}; \
            append(its, was.text, "", ""); \
        } \
        unlock(); \
        errno = after; \
        return done; \
    }

REMOVES(unlink, (const char *path), (path), AT_FDCWD)
REMOVES(rmdir, (const char *path), (path), AT_FDCWD)
REMOVES(unlinkat, (int fd, const char *path, int flags), (fd, path, flags), fd)
REMOVES(remove, (const char *path), (path), AT_FDCWD)

#define MOVES(NAME, PARAMETERS, ARGUMENTS, DIR, OTHER, KIND) \
    int NAME PARAMETERS { \
        if (!log_) \
            return REAL(NAME) ARGUMENTS; \
        lock(); \
        struct name one = look(DIR, from), two = look(OTHER, to); \
        int done = REAL(NAME) ARGUMENTS, after = errno; \
        if (done == 0 && !one.folder != !two.folder) { \
            struct record its = {.kind = UNKNOWN, .name = strlen(#NAME)}; \
            append(its, #NAME, "", ""); \
        } else if (done == 0 && one.folder && one.file != two.file) { \
            struct record its = {.kind = KIND, .name = one.length, .other = two.length, .folder = one.folder}; \
            its.into = two.folder; \
            its.file = one.file; \
            append(its, one.text, two.text, ""); \
        } \
        unlock(); \
        errno = after; \
        return done; \
    }

MOVES(rename, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD, RENAME)
MOVES(renameat, (int fd, const char *from, int other, const char *to), (fd, from, other, to), fd, other, RENAME)
MOVES(renameat2, (int fd, const char *from, int other, const char *to, unsigned flags), (fd, from, other, to, flags), fd, other, flags & RENAME_EXCHANGE ? EXCHANGE : RENAME)
MOVES(link, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD, LINK)
MOVES(linkat, (int fd, const char *from, int other, const char *to, int flags), (fd, from, other, to, flags), fd, other, LINK)

/* Record bytes that were written before ``end``, from the buffers in turn. */
static void wrote(int64_t file, int64_t at, const struct iovec *parts, int count, ssize_t left) {
    for (int number = 0; number < count && left > 0; number++) {
        size_t nbytes = parts[number].iov_len < (size_t)left ? parts[number].iov_len : (size_t)left;
        struct record its = {.kind = WRITE, .data = nbytes, .file = file, .number = at};
        append(its, "", "", parts[number].iov_base);
        at += nbytes;
        left -= nbytes;
    }
}

#define WRITES(NAME, PARAMETERS, ARGUMENTS, PLACE, PARTS, COUNT) \
    ssize_t NAME PARAMETERS { \
        int before_ = errno; \
        int64_t file = inode_of(fd, NULL); \
        errno = before_; \
        if (!file) \
            return REAL(NAME) ARGUMENTS; \
        lock(); \
        ssize_t done = REAL(NAME) ARGUMENTS; \
        int after = errno; \
        if (done > 0) \
            wrote(file, PLACE, PARTS, COUNT, done); \
        unlock(); \
        errno = after; \
        return done; \
    }

#define WHOLE ((struct iovec[]){{(void *)data, nbytes}})
#define BEHIND (lseek(fd, 0, SEEK_CUR) - done)

WRITES(write, (int fd, const void *data, size_t nbytes), (fd, data, nbytes), BEHIND, WHOLE, 1)
WRITES(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), BEHIND, parts, count)
WRITES(pwrite, (int fd, const void *data, size_t nbytes, off_t at), (fd, data, nbytes, at), at, WHOLE, 1)
WRITES(pwrite64, (int fd, const void *data, size_t nbytes, off64_t at), (fd, data, nbytes, at), at, WHOLE, 1)
WRITES(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), at, parts, count)
WRITES(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at), at, parts, count)
WRITES(pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags), at < 0 ? BEHIND : at, parts, count)
WRITES(pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags), at < 0 ? BEHIND : at, parts, count)

/* A call after which the file may have another size. */
#define RESIZES(NAME, PARAMETERS, ARGUMENTS) \
    int NAME PARAMETERS { \
        int before_ = errno; \
        int64_t file = inode_of(fd, NULL); \
        errno = before_; \
        if (!file) \
            return REAL(NAME) ARGUMENTS; \
        lock(); \
        int done = REAL(NAME) ARGUMENTS, after = errno; \
        struct record its = {.kind = SIZE}; \
        if (done == 0) { \
            its.file = inode_of(fd, &its.number); \
            append(its, "", "", ""); \
        } \
        unlock(); \
        errno = after; \
        return done; \
    }

RESIZES(ftruncate, (int fd, off_t nbytes), (fd, nbytes))
RESIZES(ftruncate64, (int fd, off64_t nbytes), (fd, nbytes))
RESIZES(posix_fallocate, (int fd, off_t at, off_t nbytes), (fd, at, nbytes))
RESIZES(posix_fallocate64, (int fd, off64_t at, off64_t nbytes), (fd, at, nbytes))

/* A call whose changes the model does not know. The scenario is then refused. */
#define REFUSES(TYPE, NAME, PARAMETERS, ARGUMENTS, CONDITION) \
    TYPE NAME PARAMETERS { \
        if (log_ && (CONDITION)) \
            say(UNKNOWN, #NAME); \
        return REAL(NAME) ARGUMENTS; \
    }

REFUSES(int, truncate, (const char *path, off_t nbytes), (path, nbytes), look(AT_FDCWD, path).folder)
REFUSES(int, truncate64, (const char *path, off64_t nbytes), (path, nbytes), look(AT_FDCWD, path).folder)
REFUSES(int, fallocate, (int fd, int mode, off_t at, off_t nbytes), (fd, mode, at, nbytes), inode_of(fd, NULL))
REFUSES(int, fallocate64, (int fd, int mode, off64_t at, off64_t nbytes), (fd, mode, at, nbytes), inode_of(fd, NULL))
REFUSES(ssize_t, sendfile, (int fd, int from, off_t *at, size_t nbytes), (fd, from, at, nbytes), inode_of(fd, NULL))
REFUSES(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t nbytes), (fd, from, at, nbytes), inode_of(fd, NULL))
REFUSES(ssize_t, copy_file_range, (int from, off64_t *at, int fd, off64_t *to, size_t nbytes, unsigned flags), (from, at, fd, to, nbytes, flags), inode_of(fd, NULL))

static uint64_t sync_begins(int64_t file) {
    struct record its = {.kind = SYNC, .file = file};
    lock();
    uint64_t at = append(its, "", "", "");
    unlock();
    return at;
}

static void sync_ends(uint64_t begun) {
    struct record its = {.kind = SYNCED, .number = begun};
    int saved = errno;
    lock();
    append(its, "", "", "");
    unlock();
    errno = saved;
}

/* A sync_file_range makes nothing durable, by its own manual page. */
#define SYNCS(NAME) \
    int NAME(int fd) { \
        int64_t file = inode_of(fd, NULL); \
        if (!file) \
            return REAL(NAME)(fd); \
        uint64_t begun = sync_begins(file); \
        int done = REAL(NAME)(fd); \
        if (done == 0) \
            sync_ends(begun); \
        return done; \
    }

SYNCS(fsync)
SYNCS(fdatasync)

int syncfs(int fd) {
    if (!inode_of(fd, NULL))
        return REAL(syncfs)(fd);
    uint64_t begun = sync_begins(0);
    int done = REAL(syncfs)(fd);
    if (done == 0)
        sync_ends(begun);
    return done;
}

void sync(void) {
    uint64_t begun = log_ ? sync_begins(0) : 0;
    REAL(sync)();
    if (log_)
        sync_ends(begun);
}
