/* An owner's blocks and what was learned of its events, as bytes, to be put into another index with
 * the same secret. Bytes that are put in are not trusted: whatever they are, the index stays sound.
 *
 * A chunk of rows is a run of blocks of one pool and segment, little-endian:
 *   u32 medium, i64 group (or NO_GROUP), u32 block size, u32 segment (0 certain, 1 uncertain),
 *   u32 count, then `count` times: u64 engine hash, u64 block key, u32 tag (as in Pool).
 * After all blocks come the ends of other attention groups (ends.h), in runs of the medium ENDS:
 *   the same head, of which only the count means anything, then `count` times: u64 engine hash,
 *   u64 counts of the groups, in the order in which the learned bytes name them, u32 zero.
 * The rows of a table are taken in strides over its slots, not in their order: a table that is
 * filled in the order of its own hash function clusters while it grows.
 */
#ifndef KVSTEER_PERSIST_H
#define KVSTEER_PERSIST_H

#include "index.h"

/* Counts every change of the layout or of its meaning, as block keys are computed: another core's
 * bytes are of no use. */
#define PERSIST_LAYOUT 2

#define ROW_BYTES 20u
#define RUN_BYTES 24u
#define LEARNED_BYTES 56u
#define GROUP_BYTES 12u
#define END_GROUP_BYTES 16u
#define ENDS UINT32_MAX

/* Where the saving of an owner continues; 0 at first. */
#define SAVED_ALL UINT64_MAX

typedef struct {
    unsigned char *bytes;
    size_t length, room;
} Buffer;

/* Returns where this many more bytes begin; NULL if out of memory. */
unsigned char *buffer_room(Buffer *buffer, size_t more);

/* Appends rows from `*at` on until the limit of work, and moves `*at`; SAVED_ALL after the last.
 * The owner's blocks must not change until all are saved. Returns false if out of memory. */
bool persist_rows(Index *index, uint32_t owner, uint64_t *at, Buffer *buffer);
/* Puts in rows from `*at` on until the limit of work, and moves `*at`. Returns INDEX_OK at their
 * end, INDEX_MORE before, INDEX_DAMAGED if they are no rows, or the owner has one of them. */
IndexResult persist_put_rows(Index *index, uint32_t owner, const unsigned char *bytes,
                             size_t length, size_t *at);
/* Appends what was learned of the owner's groups, media and copies; returns false if out of memory. */
bool persist_learned(const Owner *owner, Buffer *buffer);
/* Puts that into an empty owner; returns false, with nothing changed, if it is damaged. */
bool persist_put_learned(Index *index, uint32_t owner, const unsigned char *bytes, size_t length);

#endif
