/* CPU kernels of pdkv: linear layers on packed weights, and attention of new tokens over the paged KV pool.
 *
 * Plain C with GCC/clang vector extensions, so that one source serves AVX2, AVX-512, NEON and SSE. All arithmetic is
 * fp32; weights and KV may be stored as bf16 (the upper half of an fp32). Nothing here checks its arguments: `native.py`
 * does.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX__)
#define VW 8
#else
#define VW 4
#endif
#define NR (2 * VW)      /* columns of a packed panel */
#define MR 6             /* rows of a register tile: 12 accumulators and 2 weights of 16 registers */
#define K_BLOCK 1536     /* a panel's K range in the cache at once */
#define X_BLOCK_FLOATS 65536 /* rows times K of the input in the cache at once */
#define UNPACK_ABOVE 12  /* rows from which bf16 weights are turned into fp32 once instead of in every tile */
#define AHEAD 1024       /* bytes that weights are asked for before they are used */
#define TOKENS 16        /* context tokens per softmax update */
#define MAX_HEAD_DIM 512
#define MAX_GROUP 32     /* query heads per KV head */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* -------------------------------------------------------------------------------------------------- threads
 *
 * OpenMP waits at the end of a loop for every thread of the team, also for one that the kernel has not let run at all:
 * where cores are shared (P and D on one host), a decode step of hundreds of short loops then stands still most of the
 * time. Here the caller takes part itself and waits only for pieces that somebody has begun.
 */
typedef void (*Piece)(const void *job, int64_t piece);

enum { MAX_WORKERS = 255, WORKER_SPINS = 1000, CALLER_SPINS = 2000 };
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

/* piece(job, 0 .. pieces - 1), each once, by at most `threads` threads; returns when all are done. */
static void run_pieces(Piece piece, const void *job, int64_t pieces, int threads) {
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

/* -------------------------------------------------------------------------------------------------- vectors */

typedef float vf __attribute__((vector_size(VW * 4)));
typedef float vfu __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint16_t vhu __attribute__((vector_size(VW * 2), aligned(2), may_alias));

INLINE vf load_f32(const float *p) { return *(const vfu *)p; }

INLINE void store_f32(float *p, vf v) { *(vfu *)p = v; }

INLINE vf load_bf16(const uint16_t *p) {
    vh half = *(const vhu *)p;
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

INLINE vf broadcast(float x) { return x - (vf){0}; }

INLINE float sum_lanes(vf v) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 quarters[VW / 4], sum;
    memcpy(quarters, &v, sizeof v);
    sum = quarters[0];
    UNROLL for (int i = 1; i < VW / 4; i++) sum += quarters[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* exp of values <= 0 (a softmax's), 2 ulp; below -87 it is 0 to within fp32's smallest normal. */
INLINE vf exp_nonpositive(vf x) {
    const vf low = broadcast(-87.0f);
    const vi below = x < low; /* false for NaN, which goes through */
    x = (vf)(((vi)low & below) | ((vi)x & ~below));
    vf scaled = x * 1.44269504f - 0.5f;
    vi n = __builtin_convertvector(scaled, vi); /* towards zero: rounds x*log2(e) to nearest, as x <= 0 */
    vf nf = __builtin_convertvector(n, vf);
    vf r = x - nf * 0.693359375f;
    r = r + nf * 2.12194440e-4f;
    vf p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vf)((n + 127) << 23);
}

/* ------------------------------------------------------------------------------------------------------ linear */

/* y[mr, NR] (+)= x[mr, k] * panel[k, NR]; `rows` is a compile-time constant in every use. */
INLINE void tile(const int rows, const int bf16, const float *x, ptrdiff_t x_stride, const void *panel, ptrdiff_t k,
                 float *y, ptrdiff_t y_stride, int columns, const float *start, int accumulate) {
    const int ways = rows <= 2 ? 2 : 1; /* few rows: two chains, so that additions do not wait for each other */
    vf sum[2][MR][2];
    float edge[NR];
    UNROLL for (int m = 0; m < rows; m++) {
        const float *from = accumulate ? y + m * y_stride : start;
        if (from && columns < NR) {
            memset(edge, 0, sizeof edge);
            memcpy(edge, from, columns * sizeof(float));
            from = edge;
        }
        UNROLL for (int j = 0; j < 2; j++) {
            sum[0][m][j] = from ? load_f32(from + j * VW) : (vf){0};
            sum[1][m][j] = (vf){0};
        }
    }
    ptrdiff_t i = 0;
    for (; i + ways <= k; i += ways) {
        UNROLL for (int way = 0; way < ways; way++) {
            vf w[2];
            UNROLL for (int j = 0; j < 2; j++) {
                ptrdiff_t at = (i + way) * NR + j * VW;
                if (j == 0) __builtin_prefetch((const char *)panel + at * (bf16 ? 2 : 4) + AHEAD);
                w[j] = bf16 ? load_bf16((const uint16_t *)panel + at) : load_f32((const float *)panel + at);
            }
            UNROLL for (int m = 0; m < rows; m++) {
                vf xm = broadcast(x[m * x_stride + i + way]);
                UNROLL for (int j = 0; j < 2; j++) sum[way][m][j] += xm * w[j];
            }
        }
    }
    for (; i < k; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            ptrdiff_t at = i * NR + j * VW;
            vf w = bf16 ? load_bf16((const uint16_t *)panel + at) : load_f32((const float *)panel + at);
            UNROLL for (int m = 0; m < rows; m++) sum[0][m][j] += x[m * x_stride + i] * w;
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        float *to = columns < NR ? edge : y + m * y_stride;
        UNROLL for (int j = 0; j < 2; j++) store_f32(to + j * VW, ways == 2 ? sum[0][m][j] + sum[1][m][j] : sum[0][m][j]);
        if (columns < NR) memcpy(y + m * y_stride, edge, columns * sizeof(float));
    }
}

INLINE void tiles(const int bf16, int64_t rows, const float *x, int64_t x_stride, const void *panel, int64_t k,
                  float *y, int64_t y_stride, int columns, const float *start, int accumulate) {
    int64_t left = (rows + MR - 1) / MR; /* tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2 */
    for (int64_t m = 0; m < rows; left--) {
        int64_t height = (rows - m + left - 1) / left;
        const float *xm = x + m * x_stride;
        float *ym = y + m * y_stride;
        switch (height) {
        case 1: tile(1, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        case 2: tile(2, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        case 3: tile(3, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        case 4: tile(4, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        case 5: tile(5, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        default: tile(6, bf16, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        }
        m += height;
    }
}

typedef struct {
    const float *x, *bias;
    const void *weights;
    float *y;
    int64_t rows, k, n, panels, group, groups, m_block, k_block;
} Linear;

/* One piece: `group` panels for up to `m_block` rows. */
INLINE void linear_piece(const int bf16, const Linear *job, int64_t piece) {
    float unpacked[K_BLOCK * NR] __attribute__((aligned(64)));
    const int64_t m0 = piece / job->groups * job->m_block, first = piece % job->groups * job->group;
    const int64_t height = job->rows - m0 < job->m_block ? job->rows - m0 : job->m_block;
    const int64_t last = first + job->group < job->panels ? first + job->group : job->panels;
    const int64_t k = job->k, n = job->n;
    const size_t item = bf16 ? sizeof(uint16_t) : sizeof(float);
    for (int64_t k0 = 0; k0 < k; k0 += job->k_block) {
        const int64_t depth = k - k0 < job->k_block ? k - k0 : job->k_block;
        const float *xb = job->x + m0 * k + k0;
        for (int64_t p = first; p < last; p++) {
            const char *panel = (const char *)job->weights + (size_t)(p * k + k0) * NR * item;
            const int columns = n - p * NR < NR ? (int)(n - p * NR) : NR;
            const float *start = job->bias ? job->bias + p * NR : NULL;
            float *yb = job->y + m0 * n + p * NR;
            if (bf16 && height > UNPACK_ABOVE) {
                for (int64_t i = 0; i < depth * NR; i += VW)
                    store_f32(unpacked + i, load_bf16((const uint16_t *)panel + i));
                tiles(0, height, xb, k, unpacked, depth, yb, n, columns, start, k0 > 0);
            } else {
                tiles(bf16, height, xb, k, panel, depth, yb, n, columns, start, k0 > 0);
            }
        }
    }
}

static void linear_piece_f32(const void *job, int64_t piece) { linear_piece(0, job, piece); }

static void linear_piece_bf16(const void *job, int64_t piece) { linear_piece(1, job, piece); }

static void linear(Piece piece, const float *x, const void *weights, const float *bias, float *y, int64_t rows,
                   int64_t k, int64_t n, int threads) {
    Linear job = {.x = x, .bias = bias, .weights = weights, .y = y, .rows = rows, .k = k, .n = n};
    job.panels = (n + NR - 1) / NR;
    job.k_block = k < K_BLOCK ? k : K_BLOCK;
    job.m_block = X_BLOCK_FLOATS / job.k_block / MR * MR;
    if (job.m_block < MR) job.m_block = MR;
    job.group = job.panels / ((int64_t)threads * 8);
    job.group = job.group < 1 ? 1 : job.group > 8 ? 8 : job.group;
    job.groups = (job.panels + job.group - 1) / job.group;
    run_pieces(piece, &job, job.groups * ((rows + job.m_block - 1) / job.m_block), threads);
}

/* y[rows, n] = x[rows, k] * W^T (+ bias). `weights` are panels [ceil(n / NR)][k][NR], zero beyond n. */
void pdkv_linear_f32(const float *x, const float *weights, const float *bias, float *y, int64_t rows, int64_t k,
                     int64_t n, int threads) {
    linear(linear_piece_f32, x, weights, bias, y, rows, k, n, threads);
}

void pdkv_linear_bf16(const float *x, const uint16_t *weights, const float *bias, float *y, int64_t rows, int64_t k,
                      int64_t n, int threads) {
    linear(linear_piece_bf16, x, weights, bias, y, rows, k, n, threads);
}

int pdkv_panel_columns(void) { return NR; }

/* ---------------------------------------------------------------------------------------------------- attention */

/* One layer of the pool as one row of the batch sees it. Strides count elements. */
typedef struct {
    const void *key, *value; /* of block 0, token 0, head 0 */
    ptrdiff_t block_stride, token_stride, head_stride;
    const int32_t *table;
    int block_size, kv_heads, group; /* group: query heads per KV head */
    float scale;
} Paged;

/* The result over a part of the context: [heads] maxima and sums, [heads, dim] outputs not yet divided by the sum. */
typedef struct {
    float *max, *sum, *out;
} Partial;

#define PARTIAL_FLOATS(heads, dim) ((size_t)(heads) * ((dim) + 2))

INLINE Partial partial_at(float *memory, int heads) { return (Partial){memory, memory + heads, memory + 2 * heads}; }

INLINE ptrdiff_t element_of(const Paged *paged, int64_t token) {
    return paged->table[token / paged->block_size] * paged->block_stride +
           token % paged->block_size * paged->token_stride;
}

/* The `dim` values of one token's head: in place, or unpacked into `room`. */
INLINE const float *head_row(const int dim, const int bf16, const void *base, ptrdiff_t at, float *room) {
    if (!bf16) return (const float *)base + at;
    for (int d = 0; d < dim; d += VW) store_f32(room + d, load_bf16((const uint16_t *)base + at + d));
    return room;
}

INLINE void prefetch_row(const Paged *paged, const int bf16, ptrdiff_t at) {
    const ptrdiff_t item = bf16 ? 2 : 4, bytes = paged->token_stride * item;
    for (ptrdiff_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch((const char *)paged->key + at * item + b);
        __builtin_prefetch((const char *)paged->value + at * item + b);
    }
}

/* scores[g][i] = scale * q_g . k_i for one KV head's `group` query heads and `count` tokens. */
INLINE void score(const int dim, const int bf16, const Paged *paged, const float *query, ptrdiff_t query_stride,
                  ptrdiff_t at, int count, float (*scores)[TOKENS]) {
    float room[MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int i = 0; i < count; i++) {
        const float *key = head_row(dim, bf16, paged->key, at + i * paged->token_stride, room);
        int g = 0;
        for (; g + 3 <= paged->group; g += 3) { /* three heads at once: every key is loaded once for them */
            const float *q = query + g * query_stride;
            vf s0 = {0}, s1 = {0}, s2 = {0};
            for (int d = 0; d < dim; d += VW) {
                const vf k = load_f32(key + d);
                s0 += load_f32(q + d) * k;
                s1 += load_f32(q + query_stride + d) * k;
                s2 += load_f32(q + 2 * query_stride + d) * k;
            }
            scores[g][i] = sum_lanes(s0) * paged->scale;
            scores[g + 1][i] = sum_lanes(s1) * paged->scale;
            scores[g + 2][i] = sum_lanes(s2) * paged->scale;
        }
        for (; g < paged->group; g++) {
            vf s = {0};
            for (int d = 0; d < dim; d += VW) s += load_f32(query + g * query_stride + d) * load_f32(key + d);
            scores[g][i] = sum_lanes(s) * paged->scale;
        }
    }
}

/* Scores become weights exp(score - new maximum); maximum and sum are updated. Returns what older results shrink by. */
INLINE float soften(float *scores, int count, float *max, float *sum) {
    float top = *max;
    for (int i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
    for (int i = count; i < TOKENS; i++) scores[i] = -INFINITY;
    const float shrink = *max == top ? 1.0f : expf(*max - top);
    for (int i = 0; i < TOKENS; i += VW) store_f32(scores + i, exp_nonpositive(load_f32(scores + i) - top));
    for (int i = count; i < TOKENS; i++) scores[i] = 0;
    vf total = {0};
    for (int i = 0; i < TOKENS; i += VW) total += load_f32(scores + i);
    *sum = *sum * shrink + sum_lanes(total);
    *max = top;
    return shrink;
}

/* out[dim] = out * shrink + sum of weights[i] * rows[i]. */
INLINE void weigh(const int dim, const float *const *rows, const float *weights, int count, float shrink, float *out) {
    int d = 0;
    for (; d + 4 * VW <= dim; d += 4 * VW) {
        vf acc[4];
        UNROLL for (int j = 0; j < 4; j++) acc[j] = load_f32(out + d + j * VW) * shrink;
        for (int i = 0; i < count; i++) {
            const vf w = broadcast(weights[i]);
            UNROLL for (int j = 0; j < 4; j++) acc[j] += w * load_f32(rows[i] + d + j * VW);
        }
        UNROLL for (int j = 0; j < 4; j++) store_f32(out + d + j * VW, acc[j]);
    }
    for (; d < dim; d += VW) {
        vf acc = load_f32(out + d) * shrink;
        for (int i = 0; i < count; i++) acc += weights[i] * load_f32(rows[i] + d);
        store_f32(out + d, acc);
    }
}

/* Online softmax over tokens [begin, end) of the context for all heads; all heads of a token lie together. */
INLINE void attend(const int dim, const int bf16, const Paged *paged, const float *query, ptrdiff_t query_stride,
                   int64_t begin, int64_t end, Partial part) {
    const int heads = paged->kv_heads * paged->group;
    float unpacked[TOKENS][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MAX_GROUP][TOKENS] __attribute__((aligned(64)));
    const float *rows[TOKENS];
    for (int h = 0; h < heads; h++) part.max[h] = -INFINITY;
    memset(part.sum, 0, heads * sizeof(float));
    memset(part.out, 0, (size_t)heads * dim * sizeof(float));
    for (int64_t t = begin; t < end;) {
        int64_t count = paged->block_size - t % paged->block_size;
        if (count > TOKENS) count = TOKENS;
        if (count > end - t) count = end - t;
        const ptrdiff_t first = element_of(paged, t);
        for (int64_t next = t + count; next < t + 2 * count && next < end; next++)
            prefetch_row(paged, bf16, element_of(paged, next)); /* the next block may lie anywhere */
        for (int head = 0; head < paged->kv_heads; head++) {
            const ptrdiff_t at = first + head * paged->head_stride;
            const int h0 = head * paged->group;
            score(dim, bf16, paged, query + h0 * query_stride, query_stride, at, (int)count, scores);
            for (int i = 0; i < count; i++)
                rows[i] = head_row(dim, bf16, paged->value, at + i * paged->token_stride, unpacked[i]);
            for (int g = 0; g < paged->group; g++) {
                const float shrink = soften(scores[g], (int)count, part.max + h0 + g, part.sum + h0 + g);
                weigh(dim, rows, scores[g], (int)count, shrink, part.out + (size_t)(h0 + g) * dim);
            }
        }
        t += count;
    }
}

static void attend_any(int dim, int bf16, const Paged *paged, const float *query, ptrdiff_t query_stride, int64_t begin,
                       int64_t end, Partial part) {
    if (dim == 64 && !bf16) attend(64, 0, paged, query, query_stride, begin, end, part);
    else if (dim == 64) attend(64, 1, paged, query, query_stride, begin, end, part);
    else if (dim == 128 && !bf16) attend(128, 0, paged, query, query_stride, begin, end, part);
    else if (dim == 128) attend(128, 1, paged, query, query_stride, begin, end, part);
    else if (!bf16) attend(dim, 0, paged, query, query_stride, begin, end, part);
    else attend(dim, 1, paged, query, query_stride, begin, end, part);
}

/* out[heads, dim] from the partial results that lie one behind the other, over disjoint parts of one context. */
static void merge(float *memory, int splits, int heads, int dim, float *out) {
    const size_t stride = PARTIAL_FLOATS(heads, dim);
    memset(out, 0, (size_t)heads * dim * sizeof(float));
    for (int h = 0; h < heads; h++) {
        float top = -INFINITY, total = 0;
        for (int s = 0; s < splits; s++) {
            const float max = partial_at(memory + s * stride, heads).max[h];
            top = max > top ? max : top;
        }
        for (int s = 0; s < splits; s++) {
            const Partial part = partial_at(memory + s * stride, heads);
            if (part.sum[h] == 0) continue; /* no token was in it */
            const float weight = splits == 1 ? 1.0f : expf(part.max[h] - top);
            total += part.sum[h] * weight;
            for (int d = 0; d < dim; d++) out[h * dim + d] += part.out[h * dim + d] * weight;
        }
        for (int d = 0; d < dim; d++) out[h * dim + d] /= total;
    }
}

typedef struct {
    const float *query;
    int64_t query_token_stride, query_head_stride;
    const void *key, *value;
    int bf16;
    int64_t block_stride, token_stride, head_stride;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *rows, *tokens, *lengths;
    int heads, kv_heads, dim, block_size;
    float scale;
    int splits;
    float *partials;
} Decode;

/* One piece: a part of one row's context. */
static void decode_piece(const void *argument, int64_t piece) {
    const Decode *job = argument;
    const int64_t row = piece / job->splits, length = job->lengths[row];
    const int64_t share = (length + job->splits - 1) / job->splits, begin = piece % job->splits * share;
    const int64_t end = begin + share < length ? begin + share : length;
    const Paged paged = {
        .key = job->key,
        .value = job->value,
        .block_stride = job->block_stride,
        .token_stride = job->token_stride,
        .head_stride = job->head_stride,
        .table = job->tables + job->rows[row] * job->table_stride,
        .block_size = job->block_size,
        .kv_heads = job->kv_heads,
        .group = job->heads / job->kv_heads,
        .scale = job->scale,
    };
    const float *query = job->query + job->tokens[row] * job->query_token_stride;
    float *memory = job->partials + piece * PARTIAL_FLOATS(job->heads, job->dim);
    attend_any(job->dim, job->bf16, &paged, query, job->query_head_stride, begin, end, partial_at(memory, job->heads));
}

/* Attention of one new token per row. `query` and `out` [.., heads, dim] are addressed by token `tokens[row]` of the flat
 * batch; query strides are given, out is contiguous. `key`/`value` point to the layer's planes in block 0; a row's block
 * ids are `tables[rows[row] * table_stride ...]`, its context is `lengths[row]` >= 1 tokens, this step's included.
 * Returns 0, or -1 when memory for partial results is not there. */
int pdkv_decode_attention(const float *query, int64_t query_token_stride, int64_t query_head_stride, float *out,
                          const void *key, const void *value, int bf16, int64_t block_stride, int64_t token_stride,
                          int64_t head_stride, const int32_t *tables, int64_t table_stride, const int32_t *rows,
                          const int32_t *tokens, const int32_t *lengths, int64_t num_rows, int heads, int kv_heads,
                          int dim, int block_size, float scale, int threads) {
    Decode job = {query, query_token_stride, query_head_stride, key, value, bf16, block_stride, token_stride, head_stride,
                  tables, table_stride, rows, tokens, lengths, heads, kv_heads, dim, block_size, scale, 1, NULL};
    if (num_rows < 4 * threads) job.splits = (int)((4 * threads + num_rows - 1) / num_rows);
    const size_t floats = PARTIAL_FLOATS(heads, dim);
    job.partials = malloc(floats * num_rows * job.splits * sizeof(float));
    if (!job.partials) return -1;
    run_pieces(decode_piece, &job, num_rows * job.splits, threads);
    for (int64_t row = 0; row < num_rows; row++)
        merge(job.partials + row * job.splits * floats, job.splits, heads, dim, out + (int64_t)tokens[row] * heads * dim);
    free(job.partials);
    return 0;
}

/* ------------------------------------------------------------------------------------------- around the attention */

/* Put `count` new tokens' keys and values (fp32, [heads, dim] per token by strides) into an fp32 pool, token t into slot
 * offsets[t] of block blocks[t]. `key_pool`/`value_pool` point to the layer's planes in block 0. */
void pdkv_write_kv(const float *key, const float *value, int64_t key_token_stride, int64_t key_head_stride,
                   int64_t value_token_stride, int64_t value_head_stride, float *key_pool, float *value_pool,
                   int64_t block_stride, int64_t token_stride, int64_t head_stride, const int64_t *blocks,
                   const int64_t *offsets, int64_t count, int heads, int dim) {
    const size_t bytes = dim * sizeof(float);
    for (int64_t t = 0; t < count; t++) {
        const ptrdiff_t slot = blocks[t] * block_stride + offsets[t] * token_stride;
        for (int h = 0; h < heads; h++) {
            memcpy(key_pool + slot + h * head_stride, key + t * key_token_stride + h * key_head_stride, bytes);
            memcpy(value_pool + slot + h * head_stride, value + t * value_token_stride + h * value_head_stride, bytes);
        }
    }
}

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t rows, dim;
    float epsilon;
} Norm;

enum { NORM_ROWS = 64 }; /* of a piece */

static void norm_piece(const void *argument, int64_t piece) {
    const Norm *job = argument;
    const int64_t dim = job->dim, end = (piece + 1) * NORM_ROWS < job->rows ? (piece + 1) * NORM_ROWS : job->rows;
    for (int64_t r = piece * NORM_ROWS; r < end; r++) {
        const float *from = job->x + r * dim;
        float *to = job->y + r * dim;
        vf squares = {0};
        float rest = 0;
        int64_t d = 0;
        for (; d + VW <= dim; d += VW) squares += load_f32(from + d) * load_f32(from + d);
        for (; d < dim; d++) rest += from[d] * from[d];
        const float scale = 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)dim + job->epsilon);
        for (d = 0; d < dim; d++) to[d] = job->weight[d] * (from[d] * scale);
    }
}

/* y = x / sqrt(mean(x^2) + epsilon) * weight, row by row. */
void pdkv_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t dim, float epsilon,
                   int threads) {
    const Norm job = {x, weight, y, rows, dim, epsilon};
    run_pieces(norm_piece, &job, (rows + NORM_ROWS - 1) / NORM_ROWS, threads);
}
