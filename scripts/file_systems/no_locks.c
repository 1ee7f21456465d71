/* Preloaded: flock fails on FUSE. The kernel asks no FUSE file system about locks of folders. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/vfs.h>

int flock(int fd, int how) {
    struct statfs its;
    const char *code = getenv("NO_LOCKS");
    if (code && fstatfs(fd, &its) == 0 && its.f_type == 0x65735546) {
        errno = atoi(code);
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, how);
}
