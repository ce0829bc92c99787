/* RMS norm. */
#include <math.h>

#include "threads.h"
#include "vectors.h"

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
