/* Where an owner's other attention groups (windows, states) hold what a prefix needs.
 *
 * An engine with several kinds of attention reuses a prefix only up to a token at which each group
 * has what it needs. Groups are linked by hash: the block of another group that ends at a token has
 * the hash of the full-attention block that ends there (vLLM from 0.22 on names group, kind and
 * window of each store). So an entry counts, for one hash, the copies of each other group: an end.
 *
 * Groups of one block size and reach are a class. A class is complete at a hash if each of its
 * groups holds the end; then each certain block on the device under this hash has the holder of
 * this class in its row, from which lookup.c reads where a prefix can be reused. Hashes whose block
 * is not known (yet) wait in the same table.
 *
 * Entries are of stores since the last hole: a demotion forgets them. They count towards the limit
 * of the owner's blocks.
 */
#ifndef KVSTEER_ENDS_H
#define KVSTEER_ENDS_H

#include "table.h"

#define MAX_END_GROUPS 12u
#define MAX_END_CLASSES 4u
#define NO_REACH 0u /* what a group needs is not known */

/* Five bits of an entry for each group: copies, whether some may be none because an engine may have
 * announced a block again, and whether a removal left it in doubt if any copy is there. */
#define END_BITS 5u
#define END_COPIES 7u
#define END_MAY_REPEAT 8u
#define END_IN_DOUBT 16u
/* A tag has the complete classes, one bit each, a mark, and the serial number of the message that
 * last announced an end that was not held. */
#define END_CLASSES 0xfu
#define END_PRESENT 0x10u
#define END_MESSAGE_SHIFT 8
#define END_MESSAGES 0xffffffu

typedef struct {
    uint32_t block_size;
    uint32_t need;   /* blocks of a run before the token; 1 for a state */
    uint32_t groups; /* one bit each */
} EndClass;

typedef struct {
    int64_t number;
    uint32_t block_size, reach; /* tokens before the one at which a prefix ends */
} EndGroup;

typedef struct {
    Table entries; /* hash -> as above (tag), counts of groups (extra) */
    EndGroup groups[MAX_END_GROUPS];
    EndClass classes[MAX_END_CLASSES];
    uint32_t group_count, class_count;
    uint32_t message; /* serial number */
    bool is_inexact; /* a group cannot be followed, so that nothing is certain */
    bool is_forgotten; /* another engine may publish now: the groups go with the last entry */
    bool is_linking; /* the classes changed, and not all entries were brought up to date */
    uint32_t shard, slot; /* how far that is */
} Ends;

static inline bool end_is_held(uint64_t counts, uint32_t group) {
    uint64_t end = counts >> group * END_BITS;
    return end & END_COPIES && !(end & END_IN_DOUBT);
}

/* The classes that are complete with these counts, one bit each. */
static inline uint32_t ends_complete(const Ends *ends, uint64_t counts) {
    uint32_t held = 0, complete = 0;
    for (uint32_t group = 0; group < ends->group_count; group++)
        held |= (uint32_t)end_is_held(counts, group) << group;
    for (uint32_t n = 0; n < ends->class_count; n++)
        complete |= (uint32_t)!(ends->classes[n].groups & ~held) << n;
    return complete;
}

static inline int ends_find_group(const Ends *ends, int64_t number) {
    for (uint32_t n = 0; n < ends->group_count; n++)
        if (ends->groups[n].number == number) return (int)n;
    return -1;
}

/* Adds a group to the class of its block size and need; returns false if there are too many. */
static inline bool ends_classify(Ends *ends, uint32_t group) {
    const EndGroup *added = &ends->groups[group];
    uint32_t size = added->block_size, need = (added->reach - 1) / size + 1, n = 0;
    while (n < ends->class_count &&
           (ends->classes[n].block_size != size || ends->classes[n].need != need))
        n++;
    if (n == MAX_END_CLASSES) return false;
    if (n == ends->class_count) ends->classes[ends->class_count++] = (EndClass){size, need, 0};
    ends->classes[n].groups |= 1u << group;
    return true;
}

/* Notes a group by a store of it; an engine never changes one. */
static inline void ends_note_group(Ends *ends, int64_t number, uint32_t block_size,
                                   uint32_t reach) {
    int known = ends_find_group(ends, number);
    if (known >= 0) {
        const EndGroup *group = &ends->groups[known];
        ends->is_inexact |= group->block_size != block_size || group->reach != reach;
        return;
    }
    if (ends->is_inexact || reach == NO_REACH || !block_size ||
        ends->group_count == MAX_END_GROUPS) {
        ends->is_inexact = true;
        return;
    }
    ends->groups[ends->group_count] = (EndGroup){number, block_size, reach};
    ends->is_inexact = !ends_classify(ends, ends->group_count++);
    ends->is_linking = ends->entries.used > 0;
    ends->shard = ends->slot = 0;
}

#endif
