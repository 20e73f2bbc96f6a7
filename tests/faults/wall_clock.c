/* Preloaded: the wall clock is as far from the real one as the file $TEST_WALL_CLOCK says (8 bytes, seconds, signed).
   Every other clock is as it was, and a wait until a time of the wall clock takes as long as it would with this one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void look(void) {
    const char *path = getenv("TEST_WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *at = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) offset = at;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real ? real(id, now) : (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec told;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &told)) return -1;
    now->tv_sec = told.tv_sec;
    now->tv_usec = told.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec told;
    if (clock_gettime(CLOCK_REALTIME, &told)) return -1;
    if (now) *now = told.tv_sec;
    return told.tv_sec;
}

/* Waits. Whoever waits by the monotonic clock names a time since the boot. */

#define SINCE_BOOT_S 1000000000L
#define REAL(name)                                                                  \
    ({                                                                              \
        static __typeof__(&name) real;                                              \
        if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);               \
        real;                                                                       \
    })

static const struct timespec *by_the_real_clock(const struct timespec *until, struct timespec *room) {
    if (!until || !offset || until->tv_sec < SINCE_BOOT_S) return until;
    *room = *until;
    room->tv_sec -= *offset;
    return room;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec room;
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = REAL(pthread_cond_timedwait);
    return real(condition, mutex, by_the_real_clock(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t id, const struct timespec *until) {
    struct timespec room;
    return REAL(pthread_cond_clockwait)(condition, mutex, id, by_the_real_clock(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec room;
    return REAL(pthread_mutex_timedlock)(mutex, by_the_real_clock(until, &room));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec room;
    return REAL(sem_timedwait)(semaphore, by_the_real_clock(until, &room));
}

int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *until) {
    struct timespec room;
    return REAL(sem_clockwait)(semaphore, id, by_the_real_clock(until, &room));
}

/* Abseil, and with it gRPC and Ray, waits so. */
long syscall(long number, ...) {
    struct timespec room;
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME))
        a[3] = (long)by_the_real_clock((const struct timespec *)a[3], &room);
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
