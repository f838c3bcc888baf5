#include "changes.h"

void changes_begin(Changes *changes, uint32_t owner) {
    changes->buffer.length = 0;
    changes->owner = owner;
    changes->is_whole = true;
}

static void append(Changes *changes, const void *bytes, size_t length) {
    unsigned char *at = changes->is_whole ? buffer_room(&changes->buffer, length) : NULL;
    if (at) memcpy(at, bytes, length);
    changes->is_whole = at != NULL;
}

void changes_store(Changes *changes, const Index *index, const WireEvent *event,
                   const uint64_t *hashes) {
    const Keyed *chain = &index->keyed;
    size_t bytes = chain->count * sizeof *hashes;
    Part part = {.group = chain->pool.group, .medium = chain->pool.medium,
                 .block_size = chain->pool.block_size, .count = chain->count,
                 .flags = (uint8_t)((chain->may_repeat ? PART_MAY_REPEAT : 0) |
                                    (chain->is_uncertain ? PART_IS_UNCERTAIN : 0)),
                 .group_kind = (uint8_t)event->group_kind,
                 .names_salts = event->names_salts, .names_loras = event->names_loras};
    append(changes, &part, sizeof part);
    append(changes, hashes, bytes);
    append(changes, index->keys, bytes);
}

void changes_remove(Changes *changes, const WireEvent *event, const uint64_t *hashes,
                    const uint32_t *lefts) {
    uint32_t count = event->hash_count, zero = 0;
    Part part = {.group = event->pool.group, .medium = event->pool.medium, .count = count,
                 .is_removal = 1, .flags = event->tells_left ? PART_TELLS_LEFT : 0};
    append(changes, &part, sizeof part);
    append(changes, hashes, count * sizeof *hashes);
    if (!event->tells_left) return;
    append(changes, lefts, count * sizeof *lefts);
    append(changes, &zero, count % 2 * sizeof zero);
}

/* How many bytes follow a part. */
static size_t length_after(const Part *part) {
    size_t count = part->count;
    if (!part->is_removal) return count * 16;
    return count * 8 + (part->flags & PART_TELLS_LEFT ? (count + count % 2) * 4 : 0);
}

static bool part_is_sound(const Part *part) {
    uint32_t tier;
    bool is_named = wire_tier_of(part->medium, &tier) && part->group >= NO_GROUP &&
                    part->group <= UINT32_MAX && part->group_kind <= KIND_PREFIX;
    if (part->is_removal) return is_named;
    return is_named && part->block_size && part->block_size <= MAX_BLOCK_SIZE;
}

bool changes_are_sound(const unsigned char *bytes, size_t length) {
    while (length) {
        Part part;
        if (length < sizeof part) return false;
        memcpy(&part, bytes, sizeof part);
        size_t after = length_after(&part);
        if (!part_is_sound(&part) || after > length - sizeof part) return false;
        bytes += sizeof part + after;
        length -= sizeof part + after;
    }
    return true;
}

void changes_fetch(Index *index, uint32_t number, const unsigned char *bytes, size_t length) {
    Part part;
    if (length < sizeof part) return;
    memcpy(&part, bytes, sizeof part);
    bytes += sizeof part;
    if (length_after(&part) > length - sizeof part) return;
    PoolName pool = {.medium = part.medium, .group = part.group};
    index_fetch(index, number, &pool, bytes, part.count);
    if (!part.is_removal) index_fetch_rows(index, bytes + (size_t)part.count * 8, part.count);
}

static IndexResult repeat_store(Index *index, uint32_t number, const Part *part,
                                const unsigned char *bytes) {
    Owner *owner = &index->owners[number];
    if (part->names_salts > owner->names_salts) owner->names_salts = part->names_salts > 0;
    if (part->names_loras > owner->names_loras) owner->names_loras = part->names_loras > 0;
    Keyed chain = {.pool = {.medium = part->medium, .group = part->group,
                            .block_size = part->block_size},
                   .count = part->count,
                   .is_uncertain = part->flags & PART_IS_UNCERTAIN,
                   .may_repeat = part->flags & PART_MAY_REPEAT};
    wire_tier_of(part->medium, &chain.pool.tier);
    if (groups_stored(&owner->groups, part->group, part->group_kind) != GROUP_INDEXED)
        return INDEX_OK;
    return index_store_keyed(index, number, &chain, bytes, bytes + (size_t)part->count * 8);
}

static void repeat_removal(Index *index, uint32_t number, const Part *part,
                           const unsigned char *bytes) {
    Owner *owner = &index->owners[number];
    const unsigned char *lefts = bytes + (size_t)part->count * 8;
    bool is_indexed = groups_admission(&owner->groups, part->group) == GROUP_INDEXED;
    PoolName pool = {.medium = part->medium, .group = part->group};
    index_fetch_rows_held(index, number, &pool, bytes, part->count);
    for (uint32_t n = 0; n < part->count; n++) {
        uint64_t hash;
        uint32_t left = NOT_TOLD;
        memcpy(&hash, bytes + (size_t)n * 8, sizeof hash);
        if (part->flags & PART_TELLS_LEFT) memcpy(&left, lefts + (size_t)n * 4, sizeof left);
        bool is_held = index_remove(index, number, part->medium, part->group, hash, left);
        owner->removed_unknown += !is_held && is_indexed;
    }
}

IndexResult changes_repeat(Index *index, uint32_t number, const unsigned char *bytes,
                           size_t length) {
    const unsigned char *end = bytes + length;
    while (bytes < end) {
        Part part;
        memcpy(&part, bytes, sizeof part);
        bytes += sizeof part;
        if (part.is_removal)
            repeat_removal(index, number, &part, bytes);
        else if (repeat_store(index, number, &part, bytes) == INDEX_NO_MEMORY)
            return INDEX_NO_MEMORY;
        bytes += length_after(&part);
    }
    return INDEX_OK;
}
