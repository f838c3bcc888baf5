#include "persist.h"
#include "wire.h"

#define UNITS_OF_POOL (SEGMENTS * SHARDS)

unsigned char *buffer_room(Buffer *buffer, size_t more) {
    if (buffer->length + more > buffer->room) {
        size_t room = 2 * (buffer->length + more);
        unsigned char *grown = realloc(buffer->bytes, room);
        if (!grown) return NULL;
        buffer->bytes = grown;
        buffer->room = room;
    }
    unsigned char *at = buffer->bytes + buffer->length;
    buffer->length += more;
    return at;
}

static unsigned char *put(unsigned char *at, uint64_t value, unsigned bytes) {
    for (unsigned n = 0; n < bytes; n++) *at++ = (unsigned char)(value >> 8 * n);
    return at;
}

static uint64_t get(const unsigned char **at, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned n = 0; n < bytes; n++) value |= (uint64_t)*(*at)++ << 8 * n;
    return value;
}

static uint32_t greatest_divisor(uint32_t one, uint32_t other) {
    while (other) {
        uint32_t rest = one % other;
        one = other;
        other = rest;
    }
    return one;
}

/* A stride that reaches every slot, spread evenly from the first slots on: near the golden ratio. */
static uint32_t stride_of(uint32_t capacity) {
    uint32_t stride = (uint32_t)((uint64_t)capacity * 618 / 1000) | 1;
    while (greatest_divisor(stride, capacity) != 1) stride += 2;
    return stride;
}

/* Appends rows of one shard, from its slot `*visited` (in strides) on; has_tags: of blocks. */
static bool shard_rows(Index *index, const Shard *shard, Buffer *buffer, uint32_t *visited,
                       uint32_t *count, bool has_tags) {
    uint32_t stride = stride_of(shard->capacity);
    for (; *visited < shard->capacity && !index_is_over(index); ++*visited) {
        uint32_t slot = (uint32_t)((uint64_t)*visited * stride % shard->capacity);
        index->work++;
        if (!entry_at(shard, slot)->tag) continue;
        unsigned char *row = buffer_room(buffer, ROW_BYTES);
        if (!row) return false;
        row = put(row, entry_at(shard, slot)->key, 8);
        row = put(row, entry_at(shard, slot)->extra, 8);
        put(row, has_tags ? entry_at(shard, slot)->tag : 0, 4);
        ++*count;
    }
    return true;
}

/* A part of what an owner holds: one shard of a segment of a pool, or one of its ends. */
typedef struct {
    PoolName name;
    uint32_t segment;
    const Shard *shard;
} Unit;

static uint32_t units_of(const Owner *owner) {
    return owner->pool_count * UNITS_OF_POOL + (owner->ends ? SHARDS : 0);
}

static Unit unit_of(const Owner *owner, uint32_t number) {
    if (number >= owner->pool_count * UNITS_OF_POOL)
        return (Unit){{.medium = ENDS}, 0, &owner->ends->entries.shards[number % SHARDS]};
    const Pool *pool = owner->pools[number / UNITS_OF_POOL];
    uint32_t segment = number / SHARDS % SEGMENTS;
    PoolName name = {pool->medium, pool->tier, pool->block_size, pool->group};
    return (Unit){name, segment ^ owner->certain, &pool->blocks[segment].shards[number % SHARDS]};
}

bool persist_rows(Index *index, uint32_t number, uint64_t *at, Buffer *buffer) {
    const Owner *owner = &index->owners[number];
    uint32_t unit = (uint32_t)(*at >> 32), visited = (uint32_t)*at;
    for (; unit < units_of(owner); unit++, visited = 0) {
        if (index_is_over(index)) {
            *at = (uint64_t)unit << 32 | visited;
            return true;
        }
        Unit one = unit_of(owner, unit);
        index->work++;
        if (!one.shard->used) continue;
        size_t begin = buffer->length;
        if (!buffer_room(buffer, RUN_BYTES)) return false;
        uint32_t count = 0;
        bool is_ends = one.name.medium == ENDS;
        if (!shard_rows(index, one.shard, buffer, &visited, &count, !is_ends)) return false;
        unsigned char *run = buffer->bytes + begin;
        run = put(run, one.name.medium, 4);
        run = put(run, (uint64_t)one.name.group, 8);
        run = put(run, one.name.block_size, 4);
        run = put(run, one.segment, 4);
        put(run, count, 4);
        if (!count) buffer->length = begin;
        if (visited < one.shard->capacity) {
            *at = (uint64_t)unit << 32 | visited;
            return true;
        }
    }
    *at = SAVED_ALL;
    return true;
}

/* Reads the name of a run's pool; returns false if there is no such pool. */
static bool read_pool(const unsigned char **from, PoolName *name, uint32_t *segment) {
    name->medium = (uint32_t)get(from, 4);
    name->group = (int64_t)get(from, 8);
    name->block_size = (uint32_t)get(from, 4);
    *segment = (uint32_t)get(from, 4);
    if (name->medium == ENDS) return true;
    return wire_tier_of(name->medium, &name->tier) && name->group >= NO_GROUP &&
           name->block_size && name->block_size <= MAX_BLOCK_SIZE && *segment < SEGMENTS;
}

IndexResult persist_put_rows(Index *index, uint32_t number, const unsigned char *bytes,
                             size_t length, size_t *at) {
    while (*at < length) {
        if (length - *at < RUN_BYTES) return INDEX_DAMAGED;
        const unsigned char *from = bytes + *at;
        PoolName name;
        uint32_t segment;
        if (!read_pool(&from, &name, &segment)) return INDEX_DAMAGED;
        uint32_t count = (uint32_t)get(&from, 4);
        if (!count || count > (length - *at - RUN_BYTES) / ROW_BYTES) return INDEX_DAMAGED;
        for (uint32_t n = 0; n < count; n++) {
            uint64_t hash = get(&from, 8), key = get(&from, 8);
            uint32_t tag = (uint32_t)get(&from, 4);
            IndexResult result =
                name.medium == ENDS ? ends_put(index, number, hash, key)
                                    : index_put(index, number, &name, segment, hash, key, tag);
            if (result != INDEX_OK) return result;
        }
        *at = (size_t)(from - bytes);
        if (index_is_over(index) && *at < length) return INDEX_MORE;
    }
    return INDEX_OK;
}

/* Whether an owner has other groups, and whether their ends can be followed. */
enum { NO_ENDS, EXACT, INEXACT };

bool persist_learned(const Owner *owner, Buffer *buffer) {
    const Ends *ends = owner->ends;
    uint32_t end_groups = ends ? ends->group_count : 0;
    unsigned char *at = buffer_room(buffer, LEARNED_BYTES + owner->groups.count * GROUP_BYTES +
                                             end_groups * END_GROUP_BYTES);
    if (!at) return false;
    at = put(at, owner->block_size, 4);
    at = put(at, (uint64_t)(owner->names_salts + 1), 1);
    at = put(at, (uint64_t)(owner->names_loras + 1), 1);
    at = put(at, owner->removing, 4);
    at = put(at, owner->aging, 4);
    for (int tier = 0; tier < TIERS; tier++) at = put(at, owner->aging_on[tier], 4);
    at = put(at, owner->age, 4);
    at = put(at, owner->copies_announced, 1);
    at = put(at, owner->mark, 4);
    at = put(at, owner->removed_certain, 8);
    at = put(at, owner->groups.count, 4);
    at = put(at, !ends ? NO_ENDS : ends->is_inexact || ends->is_forgotten ? INEXACT : EXACT, 1);
    at = put(at, end_groups, 4);
    for (uint32_t n = 0; n < owner->groups.count; n++) {
        at = put(at, (uint64_t)owner->groups.known[n].number, 8);
        at = put(at, owner->groups.known[n].state, 4);
    }
    for (uint32_t n = 0; n < end_groups; n++) {
        at = put(at, (uint64_t)ends->groups[n].number, 8);
        at = put(at, ends->groups[n].block_size, 4);
        at = put(at, ends->groups[n].reach, 4);
    }
    return true;
}

/* Reads groups, which the caller frees; returns false if they are damaged. */
static bool read_groups(const unsigned char **from, uint32_t count, Groups *groups) {
    if (!count) return true;
    groups->known = malloc(count * sizeof *groups->known);
    if (!groups->known) return false;
    for (; groups->count < count; groups->count++) {
        int64_t number = (int64_t)get(from, 8);
        uint64_t state = get(from, 4);
        if (number < 0 || state > STATE_CONTRADICTED || groups_find(groups, number)) return false;
        groups->known[groups->count] = (Group){number, (GroupState)state};
        groups->unnamed += state == STATE_UNNAMED;
    }
    return true;
}

/* Reads other groups into an owner without any; returns false if they are damaged. */
static bool read_ends(Index *index, uint32_t number, const unsigned char **from, uint32_t count,
                      int kind) {
    for (uint32_t n = 0; n < count; n++) {
        int64_t group = (int64_t)get(from, 8);
        uint32_t block_size = (uint32_t)get(from, 4), reach = (uint32_t)get(from, 4);
        bool is_sound = group >= 0 && block_size && block_size <= MAX_BLOCK_SIZE && reach != NO_REACH;
        const Ends *ends = index->owners[number].ends;
        is_sound &= !ends || ends_find_group(ends, group) < 0;
        if (!is_sound || ends_note(index, number, group, block_size, reach) != INDEX_OK) {
            ends_free(index, number);
            return false;
        }
    }
    /* a group that is not followed leaves it inexact */
    if (kind == INEXACT) ends_note(index, number, 0, 0, NO_REACH);
    else if (kind == EXACT && !count) return false;
    return true;
}

bool persist_put_learned(Index *index, uint32_t number, const unsigned char *bytes, size_t length) {
    Owner *owner = &index->owners[number];
    if (length < LEARNED_BYTES) return false;
    Owner read = *owner;
    const unsigned char *from = bytes;
    read.block_size = (uint32_t)get(&from, 4);
    uint64_t salts = get(&from, 1), loras = get(&from, 1);
    read.removing = (uint32_t)get(&from, 4);
    read.aging = (uint32_t)get(&from, 4);
    read.doubted = 0;
    bool is_sound = read.block_size <= MAX_BLOCK_SIZE && salts <= 2 && loras <= 2;
    for (uint32_t tier = 0; tier < TIERS; tier++) {
        read.aging_on[tier] = (uint32_t)get(&from, 4);
        is_sound &= !(read.aging_on[tier] & ~read.aging);
        if (read.aging_on[tier] & ~read.removing) read.doubted |= 1u << tier;
    }
    read.names_salts = (int8_t)((int)salts - 1);
    read.names_loras = (int8_t)((int)loras - 1);
    read.age = (uint32_t)get(&from, 4);
    uint64_t announced = get(&from, 1);
    read.copies_announced = announced == 1;
    read.mark = (uint32_t)get(&from, 4);
    read.removed_certain = get(&from, 8);
    uint32_t count = (uint32_t)get(&from, 4);
    uint64_t ends = get(&from, 1);
    uint32_t end_groups = (uint32_t)get(&from, 4);
    is_sound &= ends <= INEXACT && end_groups <= (ends == NO_ENDS ? 0 : MAX_END_GROUPS);
    is_sound &= read.age && announced <= 1 && read.mark <= MAX_MARK && count <= MAX_GROUPS &&
                length == LEARNED_BYTES + (size_t)count * GROUP_BYTES +
                              (size_t)end_groups * END_GROUP_BYTES;
    read.restoring = read.copies_announced ? 2 : 0;
    read.groups = (Groups){0};
    if (!is_sound || !read_groups(&from, count, &read.groups) ||
        !read_ends(index, number, &from, end_groups, (int)ends)) {
        groups_forget(&read.groups);
        return false;
    }
    groups_forget(&owner->groups);
    read.ends = owner->ends;
    read.is_cut = owner->is_cut;
    *owner = read;
    return true;
}
