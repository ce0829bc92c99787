/* One layer of the paged KV pool as one row of the batch sees it. */
#ifndef PDKV_PAGED_H
#define PDKV_PAGED_H

#include <stddef.h>
#include <stdint.h>

#define MAX_HEAD_DIM 512
#define MAX_GROUP 32 /* query heads per KV head */

/* Strides count elements. */
typedef struct {
    const void *key, *value; /* of block 0, token 0, head 0 */
    ptrdiff_t block_stride, token_stride, head_stride;
    const int32_t *table;
    int block_size, kv_heads, group; /* group: query heads per KV head */
    float scale;
} Paged;

/* Where the token's first head lies. */
static inline ptrdiff_t element_of(const Paged *paged, int64_t token) {
    return paged->table[token / paged->block_size] * paged->block_stride +
           token % paged->block_size * paged->token_stride;
}

#endif
