/* CPU kernels of pdkv: linear layers on packed weights, and attention of new tokens over the paged KV pool.
 *
 * Plain C with GCC/clang vector extensions, so that one source serves AVX2, AVX-512, NEON and SSE. All arithmetic is
 * fp32; weights and KV may be stored as bf16 (the upper half of an fp32). Threads are OpenMP's, of the runtime that
 * torch has loaded already. Nothing here checks its arguments: `native.py` does.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
    float lanes[VW];
    memcpy(lanes, &v, sizeof lanes);
    for (int width = VW / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
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

INLINE void linear(const int bf16, const float *x, const void *weights, const float *bias, float *y, int64_t rows,
                   int64_t k, int64_t n, int threads) {
    const int64_t panels = (n + NR - 1) / NR;
    const int64_t k_block = k < K_BLOCK ? k : K_BLOCK;
    int64_t m_block = X_BLOCK_FLOATS / k_block / MR * MR;
    if (m_block < MR) m_block = MR;
    int64_t group = panels / ((int64_t)threads * 8);
    group = group < 1 ? 1 : group > 8 ? 8 : group;
    const int64_t groups = (panels + group - 1) / group, m_blocks = (rows + m_block - 1) / m_block;
    const size_t item = bf16 ? sizeof(uint16_t) : sizeof(float);

#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t work = 0; work < groups * m_blocks; work++) {
        float unpacked[K_BLOCK * NR] __attribute__((aligned(64)));
        const int64_t m0 = work / groups * m_block, first = work % groups * group;
        const int64_t height = rows - m0 < m_block ? rows - m0 : m_block;
        const int64_t last = first + group < panels ? first + group : panels;
        for (int64_t k0 = 0; k0 < k; k0 += k_block) {
            const int64_t depth = k - k0 < k_block ? k - k0 : k_block;
            for (int64_t p = first; p < last; p++) {
                const char *panel = (const char *)weights + (size_t)(p * k + k0) * NR * item;
                const int columns = n - p * NR < NR ? (int)(n - p * NR) : NR;
                const float *start = bias ? bias + p * NR : NULL;
                const float *xb = x + m0 * k + k0;
                float *yb = y + m0 * n + p * NR;
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
}

/* y[rows, n] = x[rows, k] * W^T (+ bias). `weights` are panels [ceil(n / NR)][k][NR], zero beyond n. */
void pdkv_linear_f32(const float *x, const float *weights, const float *bias, float *y, int64_t rows, int64_t k,
                     int64_t n, int threads) {
    linear(0, x, weights, bias, y, rows, k, n, threads);
}

void pdkv_linear_bf16(const float *x, const uint16_t *weights, const float *bias, float *y, int64_t rows, int64_t k,
                      int64_t n, int threads) {
    linear(1, x, weights, bias, y, rows, k, n, threads);
}

int pdkv_panel_columns(void) { return NR; }

/* ---------------------------------------------------------------------------------------------------- attention */

/* One row of the batch and one KV head. Strides count elements. */
typedef struct {
    const void *key, *value;    /* of block 0, token 0, this head */
    ptrdiff_t block_stride, token_stride;
    const int32_t *table;
    int block_size, group;
    float scale;
} Paged;

/* The result over a part of the context: [group] maxima and sums, [group, dim] outputs not yet divided by the sum. */
typedef struct {
    float *max, *sum, *out;
} Partial;

INLINE Partial partial_at(float *memory, int group) {
    return (Partial){memory, memory + group, memory + 2 * group};
}

#define PARTIAL_FLOATS(group, dim) ((size_t)(group) * ((dim) + 2))

/* The `dim` values of one token's head: in place, or unpacked into `room`. */
INLINE const float *head_row(const int dim, const int bf16, const void *base, ptrdiff_t at, float *room) {
    if (!bf16) return (const float *)base + at;
    for (int d = 0; d < dim; d += VW) store_f32(room + d, load_bf16((const uint16_t *)base + at + d));
    return room;
}

/* Online softmax over tokens [begin, end) of the context; `query` is [group, dim] with row stride `query_stride`. */
INLINE void attend(const int dim, const int bf16, const Paged *paged, const float *query, ptrdiff_t query_stride,
                   int64_t begin, int64_t end, Partial part) {
    const int group = paged->group;
    float room[MAX_HEAD_DIM] __attribute__((aligned(64)));
    float values[TOKENS][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MAX_GROUP][TOKENS] __attribute__((aligned(64)));
    for (int g = 0; g < group; g++) {
        part.max[g] = -INFINITY;
        part.sum[g] = 0;
        memset(part.out + g * dim, 0, dim * sizeof(float));
    }
    for (int64_t t = begin; t < end;) {
        const int64_t inside = t % paged->block_size;
        int64_t count = paged->block_size - inside;
        if (count > TOKENS) count = TOKENS;
        if (count > end - t) count = end - t;
        const ptrdiff_t at = paged->table[t / paged->block_size] * paged->block_stride + inside * paged->token_stride;

        for (int g = 0; g < group; g++)
            for (int i = (int)count; i < TOKENS; i++) scores[g][i] = -INFINITY;
        for (int i = 0; i < count; i++) {
            const float *key = head_row(dim, bf16, paged->key, at + i * paged->token_stride, room);
            for (int g = 0; g < group; g++) {
                const float *q = query + g * query_stride;
                vf a = {0}, b = {0};
                int d = 0;
                for (; d + 2 * VW <= dim; d += 2 * VW) {
                    a += load_f32(q + d) * load_f32(key + d);
                    b += load_f32(q + d + VW) * load_f32(key + d + VW);
                }
                if (d < dim) a += load_f32(q + d) * load_f32(key + d);
                scores[g][i] = sum_lanes(a + b) * paged->scale;
            }
        }
        const float *rows[TOKENS];
        for (int i = 0; i < count; i++)
            rows[i] = head_row(dim, bf16, paged->value, at + i * paged->token_stride, values[i]);
        for (int g = 0; g < group; g++) {
            float top = part.max[g];
            for (int i = 0; i < count; i++) top = scores[g][i] > top ? scores[g][i] : top;
            const float shrink = part.max[g] == top ? 1.0f : expf(part.max[g] - top);
            vf total = {0};
            for (int i = 0; i < TOKENS; i += VW) {
                vf e = exp_nonpositive(load_f32(&scores[g][i]) - top);
                store_f32(&scores[g][i], e);
            }
            for (int i = (int)count; i < TOKENS; i++) scores[g][i] = 0;
            for (int i = 0; i < TOKENS; i += VW) total += load_f32(&scores[g][i]);
            part.sum[g] = part.sum[g] * shrink + sum_lanes(total);
            part.max[g] = top;
            float *out = part.out + g * dim;
            for (int d = 0; d < dim; d += 4 * VW) {
                vf acc[4];
                const int width = dim - d < 4 * VW ? (dim - d) / VW : 4;
                UNROLL for (int j = 0; j < 4; j++) acc[j] = j < width ? load_f32(out + d + j * VW) * shrink : (vf){0};
                for (int i = 0; i < count; i++) {
                    vf p = broadcast(scores[g][i]);
                    UNROLL for (int j = 0; j < 4; j++) if (j < width) acc[j] += p * load_f32(rows[i] + d + j * VW);
                }
                UNROLL for (int j = 0; j < 4; j++) if (j < width) store_f32(out + d + j * VW, acc[j]);
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

/* out[group, dim] from the `splits` partial results that lie one behind the other, over disjoint parts of a context. */
static void merge(float *memory, int splits, int group, int dim, float *out) {
    const size_t stride = PARTIAL_FLOATS(group, dim);
    for (int g = 0; g < group; g++) {
        float top = -INFINITY, total = 0;
        for (int s = 0; s < splits; s++) {
            const Partial part = partial_at(memory + s * stride, group);
            top = part.max[g] > top ? part.max[g] : top;
        }
        memset(out + g * dim, 0, dim * sizeof(float));
        for (int s = 0; s < splits; s++) {
            const Partial part = partial_at(memory + s * stride, group);
            const float weight = splits == 1 ? 1.0f : part.sum[g] > 0 || part.sum[g] != part.sum[g] ? expf(part.max[g] - top) : 0;
            total += part.sum[g] * weight;
            for (int d = 0; d < dim; d++) out[g * dim + d] += part.out[g * dim + d] * weight;
        }
        for (int d = 0; d < dim; d++) out[g * dim + d] /= total;
    }
}

/* Attention of one new token per row. `query` and `out` [.., heads, dim] are addressed by token `tokens[row]` of the flat
 * batch; query strides are given, out is contiguous. `key`/`value` point to the layer's planes in block 0; a row's block
 * ids are `tables[rows[row] * table_stride ...]`, its context is `lengths[row]` tokens, this step's included.
 * Returns 0, or -1 when memory for partial results is not there. */
int pdkv_decode_attention(const float *query, int64_t query_token_stride, int64_t query_head_stride, float *out,
                          const void *key, const void *value, int bf16, int64_t block_stride, int64_t token_stride,
                          int64_t head_stride, const int32_t *tables, int64_t table_stride, const int32_t *rows,
                          const int32_t *tokens, const int32_t *lengths, int64_t num_rows, int heads, int kv_heads,
                          int dim, int block_size, float scale, int threads) {
    const int group = heads / kv_heads;
    const size_t item = bf16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t pairs = num_rows * kv_heads;
    const int splits = pairs >= 4 * threads ? 1 : (int)((4 * threads + pairs - 1) / pairs);
    float *partials = malloc(PARTIAL_FLOATS(group, dim) * pairs * splits * sizeof(float));
    if (!partials) return -1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t work = 0; work < pairs * splits; work++) {
        const int64_t pair = work / splits, row = pair / kv_heads, head = pair % kv_heads;
        const int64_t length = lengths[row], share = (length + splits - 1) / splits;
        const int64_t begin = work % splits * share, end = begin + share < length ? begin + share : length;
        const Paged paged = {(const char *)key + head * head_stride * item,
                             (const char *)value + head * head_stride * item,
                             block_stride, token_stride, tables + rows[row] * table_stride, block_size, group, scale};
        const float *q = query + tokens[row] * query_token_stride + head * group * query_head_stride;
        float *memory = partials + work * PARTIAL_FLOATS(group, dim);
        attend_any(dim, bf16, &paged, q, query_head_stride, begin, end, partial_at(memory, group));
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t row = pair / kv_heads, head = pair % kv_heads;
        merge(partials + pair * splits * PARTIAL_FLOATS(group, dim), splits, group, dim,
              out + ((int64_t)tokens[row] * heads + head * group) * dim);
    }
    free(partials);
    return 0;
}
