/* The kernels' threads.
 *
 * OpenMP waits at the end of a loop for every thread of the team, also for one that the kernel has not let run at all:
 * where cores are shared (P and D on one host), a decode step of hundreds of short loops then stands still most of the
 * time. Here the caller takes part itself and waits only for pieces that somebody has begun.
 */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

enum { MAX_WORKERS = 255, WORKER_SPINS = 10000, CALLER_SPINS = 2000 };
#define CLOSED UINT32_MAX

static struct {
    pthread_mutex_t owner;      /* one job at a time; a second caller works alone */
    pthread_mutex_t sleep;
    pthread_cond_t work, done;
    _Atomic uint64_t ticket;    /* number of the job << 32 | next piece, or CLOSED */
    _Atomic uint64_t limit;     /* number of the job << 32 | how many workers may take part */
    _Atomic int64_t finished;   /* pieces of this job */
    _Atomic int sleepers, caller_sleeps;
    Piece piece;
    const void *job;
    int64_t pieces;
    int workers;
    pid_t process;              /* threads do not survive a fork */
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          CLOSED, 0, 0, 0, 0, NULL, NULL, 0, 0, 0};

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take pieces of job `number` until there are none. What is read of the job is used only if the ticket, which is closed
 * before the job changes, has not changed in between. */
static void take_part(uint32_t number) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        const uint32_t next = (uint32_t)ticket;
        if (ticket >> 32 != number || next == CLOSED) return;
        const Piece piece = pool.piece;
        const void *job = pool.job;
        const int64_t pieces = pool.pieces;
        if (next >= pieces) return;
        if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) continue;
        piece(job, next);
        if (atomic_fetch_add(&pool.finished, 1) + 1 == pieces && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.sleep);
            pthread_cond_broadcast(&pool.done);
            pthread_mutex_unlock(&pool.sleep);
        }
    }
}

static void *worker(void *argument) {
    const int rank = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        while ((uint32_t)(atomic_load(&pool.ticket) >> 32) == seen) {
            if (++spins < WORKER_SPINS) {
                pause_cpu();
                continue;
            }
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleepers, 1);
            while ((uint32_t)(atomic_load(&pool.ticket) >> 32) == seen) pthread_cond_wait(&pool.work, &pool.sleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = (uint32_t)(atomic_load(&pool.ticket) >> 32);
        const uint64_t limit = atomic_load(&pool.limit);
        if (limit >> 32 == seen && rank < (int)(uint32_t)limit) take_part(seen);
    }
    return NULL;
}

static void start_workers(int wanted) {
    if (pool.process != getpid()) {
        pool.process = getpid();
        pool.workers = 0;
        atomic_store(&pool.sleepers, 0);
    }
    for (; pool.workers < wanted && pool.workers < MAX_WORKERS; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)pool.workers) != 0) return; /* fewer will do */
        pthread_detach(thread);
    }
}

void run_pieces(Piece piece, const void *job, int64_t pieces, int threads) {
    if (threads < 2 || pieces < 2 || pieces >= CLOSED || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t i = 0; i < pieces; i++) piece(job, i);
        return;
    }
    start_workers(threads - 1);
    const uint32_t number = (uint32_t)(atomic_load(&pool.ticket) >> 32) + 1;
    pool.piece = piece; /* the ticket is closed since the last job */
    pool.job = job;
    pool.pieces = pieces;
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.limit, (uint64_t)number << 32 | (uint32_t)(threads - 1));
    atomic_store(&pool.ticket, (uint64_t)number << 32);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_part(number);
    for (int spins = 0; atomic_load(&pool.finished) < pieces; spins++) {
        if (spins < CALLER_SPINS) {
            pause_cpu();
            continue;
        }
        pthread_mutex_lock(&pool.sleep);
        atomic_store(&pool.caller_sleeps, 1);
        while (atomic_load(&pool.finished) < pieces) pthread_cond_wait(&pool.done, &pool.sleep);
        atomic_store(&pool.caller_sleeps, 0);
        pthread_mutex_unlock(&pool.sleep);
    }
    atomic_store(&pool.ticket, (uint64_t)number << 32 | CLOSED);
    pthread_mutex_unlock(&pool.owner);
}
