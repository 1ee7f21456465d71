/* Gives a process a wall clock of its own: the real one, and the seconds in the file $ASYNCCKPT_TEST_CLOCK beyond it.

   The file holds one 64-bit number, and may change at any time. Other clocks, and the times of files, stay. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none;
static const volatile int64_t *seconds = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ASYNCCKPT_TEST_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED)
        seconds = at;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *seconds;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, now, zone);
    if (code == 0 && now)
        now->tv_sec += *seconds;
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

/* Python before 3.11 waits until a time by the wall clock. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = *until;
    real.tv_sec -= *seconds;
    return sem_clockwait(semaphore, CLOCK_REALTIME, &real);
}
