/* The figures of workers in a message of another router, read from MessagePack. */
#ifndef KVSTEER_FIGURES_H
#define KVSTEER_FIGURES_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_FIGURES = 256 };

/* A router's figures of one worker, of which those of the queue count only at first. */
typedef struct {
    uint64_t worker;
    long long in_flight, booked_tokens, sent_tokens;
} Figures;

/* Reads at most MOST_FIGURES rows, which are within the bounds of extproc.routing.told.WorkerNews;
 * returns how many, -1 if it cannot: then its decoder has to say whether they are sound. */
ptrdiff_t figures_read(const void *bytes, size_t length, Figures *rows);

#endif
