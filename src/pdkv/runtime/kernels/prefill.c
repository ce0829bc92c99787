/* Attention of prompt chunks over the paged KV pool: each new token sees the context up to itself.
 *
 * A piece of work is a block of query tokens with the query heads that share one KV head. It walks over the context in
 * tiles of keys; a tile's K and V are packed once into panels for all rows of the piece (a row is one token's query in
 * one head). Strips of a few rows then take scores, online softmax and weighted values in turn, so that their scores
 * never leave the first cache. What no row of a strip may see is not computed.
 *
 * Nothing here checks its arguments: `native.py` does.
 */
#include <math.h>
#include <stdlib.h>

#include "paged.h"
#include "threads.h"
#include "vectors.h"

#define NR (2 * VW) /* columns of a panel */
#if VW == 16
#define MR 8        /* rows of a register tile: as in linear.c */
#else
#define MR 6
#endif
#define STRIP (4 * MR)
#define KEYS 128            /* of a tile, at most */
#define TILE_FLOATS 16384   /* of a tile's packed K, and of its V */
#define ROWS 384            /* of a piece, at most */
#define ROWS_FLOATS 24576   /* of a piece's queries, and of its results */

/* Query tokens first .. first + count - 1 of a row's chunk, which see up to `end` tokens of context. */
typedef struct {
    int64_t row, first, count, end;
} Block;

typedef struct {
    const float *query;
    int64_t query_token_stride, query_head_stride;
    float *out;
    const void *key, *value;
    int bf16;
    int64_t block_stride, token_stride, head_stride;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *rows, *starts, *counts, *contexts;
    int heads, kv_heads, dim, block_size;
    float scale;
    Block *blocks;
} Prefill;

/* What a piece needs beside the pool; all of it stays in the second cache. */
typedef struct {
    float query[ROWS_FLOATS], out[ROWS_FLOATS], key[TILE_FLOATS], value[TILE_FLOATS], scores[STRIP * KEYS];
    float max[ROWS + MR], sum[ROWS + MR];
} Scratch;

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

/* y[MR, NR] = x[MR, depth] * panel[depth, NR], plus y * shrink[MR] when that is given. */
INLINE void tile(const float *x, ptrdiff_t x_stride, const float *panel, int64_t depth, float *y, ptrdiff_t y_stride,
                 const float *shrink) {
    vf sum[MR][2];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int j = 0; j < 2; j++)
            sum[m][j] = shrink ? load_f32(y + m * y_stride + j * VW) * shrink[m] : (vf){0};
    for (int64_t i = 0; i < depth; i++) {
        const vf w0 = load_f32(panel + i * NR), w1 = load_f32(panel + i * NR + VW);
        UNROLL for (int m = 0; m < MR; m++) {
            const vf xm = broadcast(x[m * x_stride + i]);
            sum[m][0] += xm * w0;
            sum[m][1] += xm * w1;
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int j = 0; j < 2; j++) store_f32(y + m * y_stride + j * VW, sum[m][j]);
}

/* The piece's queries as rows [count * group, dim], scaled to powers of two; rows up to a whole register tile are 0. */
static void pack_queries(const Prefill *job, const Block *block, int head, int group, float *packed) {
    const int dim = job->dim;
    const float scale = job->scale * 1.44269504f; /* log2(e) */
    const float *from = job->query + (job->starts[block->row] + block->first) * job->query_token_stride;
    for (int64_t i = 0; i < block->count; i++, from += job->query_token_stride)
        for (int g = 0; g < group; g++, packed += dim) {
            const float *row = from + (head * group + g) * job->query_head_stride;
            for (int d = 0; d < dim; d += VW) store_f32(packed + d, load_f32(row + d) * scale);
        }
    const int64_t rows = block->count * group;
    memset(packed, 0, (round_up(rows, MR) - rows) * dim * sizeof(float));
}

INLINE vf load_stored(const int bf16, const void *base, ptrdiff_t at) {
    return bf16 ? load_bf16((const uint16_t *)base + at) : load_f32((const float *)base + at);
}

/* Keys [first, first + count) as panels [ceil(count / NR)][dim][NR], 0 beyond count. */
INLINE void pack_keys(const int bf16, const Paged *paged, int64_t first, int64_t count, int dim, float *packed) {
    float room[NR][MAX_HEAD_DIM] __attribute__((aligned(64)));
    const float *rows[NR];
    for (int64_t n = 0; n < count; n += NR, packed += (ptrdiff_t)NR * dim) {
        for (int i = 0; i < NR; i++) {
            rows[i] = room[i];
            if (n + i >= count) {
                memset(room[i], 0, dim * sizeof(float));
                continue;
            }
            const ptrdiff_t at = element_of(paged, first + n + i);
            if (bf16)
                for (int d = 0; d < dim; d += VW) store_f32(room[i] + d, load_stored(1, paged->key, at + d));
            else
                rows[i] = (const float *)paged->key + at;
        }
        for (int d = 0; d < dim; d++)
            UNROLL for (int i = 0; i < NR; i++) packed[d * NR + i] = rows[i][d];
    }
}

/* Values [first, first + count) as panels [ceil(dim / NR)][count][NR], 0 beyond dim. */
INLINE void pack_values(const int bf16, const Paged *paged, int64_t first, int64_t count, int dim, float *packed) {
    for (int64_t i = 0; i < count; i++) {
        const ptrdiff_t at = element_of(paged, first + i);
        for (int d = 0; d < round_up(dim, NR); d += VW) {
            const vf v = d < dim ? load_stored(bf16, paged->value, at + d) : (vf){0};
            store_f32(packed + (d / NR * count + i) * NR + d % NR, v);
        }
    }
}

/* Scores become weights 2^(score - new maximum), 0 from `visible` up to `depth`; maximum and sum are updated. Returns
 * what older results shrink by. */
INLINE float soften(float *scores, int64_t visible, int64_t depth, float *max, float *sum) {
    if (visible <= 0) {
        memset(scores, 0, depth * sizeof(float));
        return 1.0f;
    }
    const int64_t end = round_up(visible, NR);
    for (int64_t i = visible; i < end; i++) scores[i] = -INFINITY;
    vf tops[2] = {broadcast(*max), broadcast(*max)};
    for (int64_t i = 0; i < end; i += NR)
        UNROLL for (int j = 0; j < 2; j++) tops[j] = larger(load_f32(scores + i + j * VW), tops[j]);
    const float top = largest_lane(larger(tops[0], tops[1]));
    vf total = {0};
    for (int64_t i = 0; i < end; i += VW) {
        const vf weight = exp2_nonpositive(load_f32(scores + i) - top);
        total += weight;
        store_f32(scores + i, weight);
    }
    for (int64_t i = visible; i < depth; i++) scores[i] = 0;
    const float shrink = *max == top ? 1.0f : exp2f(*max - top);
    *sum = *sum * shrink + sum_lanes(total);
    *max = top;
    return shrink;
}

/* Take keys [first, first + count), packed, into the results of rows r0 .. r0 + rows - 1; row r sees those of them that
 * lie before `seen` + r / group. */
INLINE void attend_strip(const int dim, Scratch *scratch, int64_t r0, int64_t rows, int64_t seen, int group,
                         int64_t first, int64_t count) {
    const int64_t depth = at_most(seen + (r0 + rows - 1) / group - first, count), width = round_up(dim, NR);
    if (depth <= 0) return;
    float *scores = scratch->scores, shrink[STRIP];
    for (int64_t n = 0; n < depth; n += NR)
        for (int64_t m = 0; m < rows; m += MR)
            tile(scratch->query + (r0 + m) * dim, dim, scratch->key + n * dim, dim, scores + m * KEYS + n, KEYS, NULL);
    for (int64_t r = 0; r < round_up(rows, MR); r++) {
        const int64_t visible = at_most(seen + (r0 + r) / group - first, depth);
        shrink[r] = soften(scores + r * KEYS, visible, depth, scratch->max + r0 + r, scratch->sum + r0 + r);
    }
    for (int64_t d = 0; d < width; d += NR)
        for (int64_t m = 0; m < rows; m += MR)
            tile(scores + m * KEYS, KEYS, scratch->value + d * count, depth, scratch->out + (r0 + m) * width + d, width,
                 shrink + m);
}

static void finish(const Prefill *job, const Block *block, int head, int group, const Scratch *scratch) {
    const int dim = job->dim;
    const int64_t width = round_up(dim, NR), rows = block->count * group;
    float *out = job->out + (job->starts[block->row] + block->first) * (int64_t)job->heads * dim + head * group * dim;
    for (int64_t r = 0; r < rows; r++) {
        float *to = out + (r / group * job->heads + r % group) * dim;
        for (int d = 0; d < dim; d += VW) store_f32(to + d, load_f32(scratch->out + r * width + d) / scratch->sum[r]);
    }
}

INLINE void attend(const int dim, const int bf16, const Prefill *job, const Block *block, int head) {
    Scratch scratch;
    const int group = job->heads / job->kv_heads;
    const int64_t rows = block->count * group, padded = round_up(rows, MR);
    const ptrdiff_t item = bf16 ? 2 : 4, offset = head * job->head_stride * item;
    const Paged paged = {
        .key = (const char *)job->key + offset,
        .value = (const char *)job->value + offset,
        .block_stride = job->block_stride,
        .token_stride = job->token_stride,
        .head_stride = job->head_stride,
        .table = job->tables + job->rows[block->row] * job->table_stride,
        .block_size = job->block_size,
        .kv_heads = job->kv_heads,
        .group = group,
        .scale = job->scale,
    };
    pack_queries(job, block, head, group, scratch.query);
    memset(scratch.out, 0, padded * round_up(dim, NR) * sizeof(float));
    memset(scratch.sum, 0, padded * sizeof(float));
    for (int64_t r = 0; r < padded; r++) scratch.max[r] = -INFINITY;
    const int64_t keys = at_most(KEYS, TILE_FLOATS / round_up(dim, NR) / NR * NR), seen = block->end - block->count + 1;
    for (int64_t first = 0; first < block->end; first += keys) {
        const int64_t count = at_most(keys, block->end - first);
        pack_keys(bf16, &paged, first, count, dim, scratch.key);
        pack_values(bf16, &paged, first, count, dim, scratch.value);
        for (int64_t r0 = 0; r0 < rows; r0 += STRIP)
            attend_strip(dim, &scratch, r0, at_most(STRIP, rows - r0), seen, group, first, count);
    }
    finish(job, block, head, group, &scratch);
}

/* One piece: a block of query tokens, and one KV head. */
static void prefill_piece(const void *argument, int64_t piece) {
    const Prefill *job = argument;
    const Block *block = job->blocks + piece / job->kv_heads;
    const int head = (int)(piece % job->kv_heads);
    if (job->dim == 64 && !job->bf16) attend(64, 0, job, block, head);
    else if (job->dim == 128 && !job->bf16) attend(128, 0, job, block, head);
    else if (!job->bf16) attend(job->dim, 0, job, block, head);
    else attend(job->dim, 1, job, block, head);
}

static int by_falling_work(const void *a, const void *b) {
    const Block *x = a, *y = b;
    const int64_t first = x->count * (2 * x->end - x->count), second = y->count * (2 * y->end - y->count);
    return (first < second) - (first > second);
}

static int64_t count_blocks(const int32_t *counts, int64_t num_rows, int64_t tokens) {
    int64_t blocks = 0;
    for (int64_t row = 0; row < num_rows; row++) blocks += (counts[row] + tokens - 1) / tokens;
    return blocks;
}

/* Attention of `num_rows` chunks of new tokens: row r's are tokens starts[r] .. starts[r] + counts[r] - 1 of the flat
 * batch, the last of contexts[r] tokens whose K and V are in the pool. `query` and `out` [.., heads, dim] are addressed
 * by token of the flat batch; query strides are given, out is contiguous. `key`/`value` point to the layer's planes in
 * block 0; a row's block ids are `tables[rows[r] * table_stride ...]`.
 * Returns 0, or -1 when memory for the list of pieces is not there. */
int pdkv_prefill_attention(const float *query, int64_t query_token_stride, int64_t query_head_stride, float *out,
                           const void *key, const void *value, int bf16, int64_t block_stride, int64_t token_stride,
                           int64_t head_stride, const int32_t *tables, int64_t table_stride, const int32_t *rows,
                           const int32_t *starts, const int32_t *counts, const int32_t *contexts, int64_t num_rows,
                           int heads, int kv_heads, int dim, int block_size, float scale, int threads) {
    Prefill job = {query, query_token_stride, query_head_stride, out, key, value, bf16, block_stride, token_stride,
                   head_stride, tables, table_stride, rows, starts, counts, contexts, heads, kv_heads, dim, block_size,
                   scale, NULL};
    const int group = heads / kv_heads;
    int64_t tokens = at_most(ROWS, ROWS_FLOATS / round_up(dim, NR) / MR * MR) / group;
    while (tokens > 1 && tokens * group > STRIP && count_blocks(counts, num_rows, tokens) * kv_heads < 4 * threads)
        tokens = (tokens + 1) / 2;
    job.blocks = malloc(count_blocks(counts, num_rows, tokens) * sizeof(Block));
    if (!job.blocks) return -1;
    int64_t blocks = 0;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t first = 0; first < counts[row]; first += tokens) {
            const int64_t count = at_most(tokens, counts[row] - first);
            job.blocks[blocks++] = (Block){row, first, count, contexts[row] - counts[row] + first + count};
        }
    qsort(job.blocks, blocks, sizeof(Block), by_falling_work);
    run_pieces(prefill_piece, &job, blocks * kv_heads, threads);
    free(job.blocks);
    return 0;
}
