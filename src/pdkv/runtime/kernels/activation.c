/* What lies between the two halves of a gated MLP. */
#include "threads.h"
#include "vectors.h"

enum { GATE_FLOATS = 16384 }; /* of a piece */

typedef struct {
    float *gate;
    const float *up;
    int64_t count;
} Gate;

/* x / (1 + e^-x), from the exponential that cannot overflow. */
INLINE vf silu(vf x) {
    const vi negative = x < 0;
    const vf e = exp_nonpositive((vf)((vi)x | (vi)broadcast(-0.0f)));
    const vf weight = (vf)(((vi)e & negative) | ((vi)broadcast(1.0f) & ~negative));
    return x * weight / (1.0f + e);
}

static void gate_piece(const void *argument, int64_t piece) {
    const Gate *job = argument;
    const int64_t begin = piece * GATE_FLOATS, left = job->count - begin;
    const int64_t count = left < GATE_FLOATS ? left : GATE_FLOATS;
    float *gate = job->gate + begin;
    const float *up = job->up + begin;
    int64_t i = 0;
    for (; i + VW <= count; i += VW) store_f32(gate + i, silu(load_f32(gate + i)) * load_f32(up + i));
    if (i < count) {
        vf x = {0};
        memcpy(&x, gate + i, (count - i) * sizeof(float));
        const vf y = silu(x);
        for (int j = 0; i + j < count; j++) gate[i + j] = y[j] * up[i + j];
    }
}

/* gate = silu(gate) * up, over `count` values. */
void pdkv_silu_mul(float *gate, const float *up, int64_t count, int threads) {
    const Gate job = {gate, up, count};
    run_pieces(gate_piece, &job, (count + GATE_FLOATS - 1) / GATE_FLOATS, threads);
}
