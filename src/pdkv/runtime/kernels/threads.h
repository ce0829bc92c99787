/* Work in pieces on several threads. */
#ifndef PDKV_THREADS_H
#define PDKV_THREADS_H

#include <stdint.h>

typedef void (*Piece)(const void *job, int64_t piece);

/* piece(job, 0 .. pieces - 1), each once, by at most `threads` threads; returns when all are done. Callers on several
 * threads may use it at once: one of them gets the workers, the others work alone. */
void run_pieces(Piece piece, const void *job, int64_t pieces, int threads);

#endif
