/* Attention of single new tokens over the paged KV pool, and putting new tokens' K and V there.
 *
 * Nothing here checks its arguments: `native.py` does.
 */
#include <math.h>
#include <stdlib.h>

#include "paged.h"
#include "threads.h"
#include "vectors.h"

#define TOKENS 16 /* context tokens per softmax update */

/* The result over a part of the context: [heads] maxima and sums, [heads, dim] outputs not yet divided by the sum. */
typedef struct {
    float *max, *sum, *out;
} Partial;

#define PARTIAL_FLOATS(heads, dim) ((size_t)(heads) * ((dim) + 2))

INLINE Partial partial_at(float *memory, int heads) { return (Partial){memory, memory + heads, memory + 2 * heads}; }

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
