/* Vectors of the CPU at hand: GCC/clang vector extensions, so that one source serves AVX2, AVX-512, NEON and SSE.
 *
 * All arithmetic is fp32; weights and KV may be stored as bf16, the upper half of an fp32.
 */
#ifndef PDKV_VECTORS_H
#define PDKV_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX__)
#define VW 8
#else
#define VW 4
#endif

#define INLINE static inline __attribute__((always_inline, unused))
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

typedef float v4 __attribute__((vector_size(16)));

INLINE float sum_lanes(vf v) {
    v4 quarters[VW / 4], sum;
    memcpy(quarters, &v, sizeof v);
    sum = quarters[0];
    UNROLL for (int i = 1; i < VW / 4; i++) sum += quarters[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Lane by lane a > b ? a : b, so b where either is NaN. */
INLINE vf larger(vf a, vf b) {
    const vi is = a > b;
    return (vf)(((vi)a & is) | ((vi)b & ~is));
}

INLINE float largest_lane(vf v) {
    v4 quarters[VW / 4], top;
    memcpy(quarters, &v, sizeof v);
    top = quarters[0];
    for (int i = 1; i < VW / 4; i++) {
        typedef int32_t i4 __attribute__((vector_size(16)));
        const i4 is = quarters[i] > top;
        top = (v4)(((i4)quarters[i] & is) | ((i4)top & ~is));
    }
    const float a = top[0] > top[1] ? top[0] : top[1], b = top[2] > top[3] ? top[2] : top[3];
    return a > b ? a : b;
}

/* exp of values <= 0 (a softmax's), 2 ulp; below -87 it is 0 to within fp32's smallest normal. */
INLINE vf exp_nonpositive(vf x) {
    x = larger(broadcast(-87.0f), x); /* NaN goes through */
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

/* 2^x of values <= 0, 2 ulp; below -126 it is fp32's smallest normal, which is 0 to a softmax. NaN stays NaN. */
INLINE vf exp2_nonpositive(vf x) {
    x = larger(broadcast(-126.0f), x);
    const vf shifted = x + 12582912.0f; /* 1.5 * 2^23: the integer nearest to x is in the lowest bits */
    const vf r = x - (shifted - 12582912.0f);
    vf p = broadcast(1.326472731e-3f);
    p = p * r + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    p = p * r + 1.0f;
    return p * (vf)(((vi)shifted << 23) + (127 << 23));
}

#endif
