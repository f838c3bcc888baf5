/* What a message has changed, as bytes, for other processes that hold the same under the same secret
 * and repeat it without decoding or hashing anything (kvstate/relay/records.py).
 *
 * Only messages that store and remove blocks of groups that hold the whole prefix can be told so.
 * Parts, back to back, in the machine's order: a Part, then `count` engine hashes, then for a store
 * as many block keys, and for a removal that tells them as many u32 counts of copies left, with
 * zeros up to a multiple of 8 bytes.
 */
#ifndef KVSTEER_CHANGES_H
#define KVSTEER_CHANGES_H

#include "persist.h"
#include "wire.h"

#define PART_MAY_REPEAT 1u
#define PART_IS_UNCERTAIN 2u
#define PART_TELLS_LEFT 4u

typedef struct {
    int64_t group;
    uint32_t medium, block_size, count;
    uint8_t is_removal, flags, group_kind;
    int8_t names_salts, names_loras; /* as in WireEvent */
    uint8_t zeros[7];
} Part;

/* owner: whose message it was. is_whole: nothing else has changed. */
typedef struct {
    Buffer buffer;
    uint32_t owner;
    bool is_whole;
} Changes;

/* Notes that a message of an owner begins. */
void changes_begin(Changes *changes, uint32_t owner);
/* Note the last chain that index_store() stored, and removals. Without memory it is not whole. */
void changes_store(Changes *changes, const Index *index, const WireEvent *event,
                   const uint64_t *hashes);
void changes_remove(Changes *changes, const WireEvent *event, const uint64_t *hashes,
                    const uint32_t *lefts);
/* Whether these bytes are such parts. */
bool changes_are_sound(const unsigned char *bytes, size_t length);
/* Has what the first part changes on its way from memory. */
void changes_fetch(Index *index, uint32_t owner, const unsigned char *bytes, size_t length);
/* Repeats sound ones; returns INDEX_NO_MEMORY, or INDEX_OK. */
IndexResult changes_repeat(Index *index, uint32_t owner, const unsigned char *bytes, size_t length);

#endif
