/* Linear layers on packed weights: panels of NR outputs, each streamed through the cache once.
 *
 * Every output is one chain of additions over k from 0 on, so that it does not depend on the rows beside it; one or two
 * rows alone have two chains, so that additions do not wait for each other.
 *
 * Nothing here checks its arguments: `native.py` does.
 */
#include "threads.h"
#include "vectors.h"

#define NR (2 * VW)      /* columns of a packed panel */
#if VW == 16
#define MR 8             /* rows of a register tile: 16 accumulators of 32 registers (12 rows are no faster) */
#else
#define MR 6             /* 12 accumulators and 2 weights of 16 registers */
#endif
#define K_BLOCK 1536     /* a panel's K range in the cache at once */
#define X_BLOCK_FLOATS 65536 /* rows times K of the input in the cache at once */
#define UNPACK_ABOVE 12  /* rows from which bf16 weights are turned into fp32 once instead of in every tile */
#define AHEAD 1024       /* bytes that weights are asked for before they are used */

/* y[mr, NR] (+)= x[mr, k] * panel[k, NR] in `ways` chains; `rows`, `bf16` and `ways` are compile-time constants. */
INLINE void tile(const int rows, const int bf16, const int ways, const float *x, ptrdiff_t x_stride, const void *panel,
                 ptrdiff_t k, float *y, ptrdiff_t y_stride, int columns, const float *start, int accumulate) {
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
        UNROLL for (int j = 0; j < 2; j++)
            store_f32(to + j * VW, ways == 2 ? sum[0][m][j] + sum[1][m][j] : sum[0][m][j]);
        if (columns < NR) memcpy(y + m * y_stride, edge, columns * sizeof(float));
    }
}

/* Tiles of nearly equal height: 12 rows are 6 + 6, not 8 + 4. `alone`: the whole batch is one or two rows. */
INLINE void tiles(const int bf16, int alone, int64_t rows, const float *x, int64_t x_stride, const void *panel,
                  int64_t k, float *y, int64_t y_stride, int columns, const float *start, int accumulate) {
    int64_t left = (rows + MR - 1) / MR;
    for (int64_t m = 0, height; m < rows; m += height, left--) {
        height = (rows - m + left - 1) / left;
        const float *xm = x + m * x_stride;
        float *ym = y + m * y_stride;
#define CASE(height, ways) \
    case height: tile(height, bf16, ways, xm, x_stride, panel, k, ym, y_stride, columns, start, accumulate); break;
        if (alone) {
            switch (height) { CASE(1, 2) CASE(2, 2) }
            continue;
        }
        switch (height) {
            CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if MR == 8
            CASE(7, 1) CASE(8, 1)
#endif
        }
#undef CASE
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
    const int alone = job->rows <= 2;
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
                tiles(0, alone, height, xb, k, unpacked, depth, yb, n, columns, start, k0 > 0);
            } else {
                tiles(bf16, alone, height, xb, k, panel, depth, yb, n, columns, start, k0 > 0);
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
