/* Scans the bytes of a request: JSON marks, and runs of tokens. No state is kept between calls. */
#ifndef KVSTEER_SCAN_H
#define KVSTEER_SCAN_H

#include <stddef.h>
#include <stdint.h>

#define RUN_TOKENS 8u

/* brackets: those that open an object or a list. */
typedef struct {
    size_t brackets, quotes, commas;
} Marks;

/* All marks, including those within texts. */
Marks scan_marks(const uint8_t *body, size_t length);

/* The marks that the decoder will see: no escaped quotes, and nothing within texts.
 * max_quotes: with more, the rest is not scanned. */
Marks scan_marks_outside(const uint8_t *body, size_t length, size_t max_quotes);

/* Writes a number for each run of RUN_TOKENS tokens, count - RUN_TOKENS + 1 of them. */
void scan_runs(const uint32_t *tokens, size_t count, uint64_t *runs);

#endif
