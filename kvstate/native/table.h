/* A map from 64-bit keys to small values that grows without long pauses.
 *
 * Open addressing with linear probing, split over shards that grow one by one: the longest pause is
 * the rehash of one shard. A slot is empty when its tag is 0, so tags are counts or ids from 1 on.
 * All of a slot is together, without padding, since each line of memory that is not cached takes
 * longer than everything else that is done for a block.
 *
 * Keys may be chosen by an attacker: slots are found by a hash with a secret, so that nobody can
 * cause long probe chains on purpose.
 */
#ifndef KVSTEER_TABLE_H
#define KVSTEER_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHARD_BITS 4
#define SHARDS (1u << SHARD_BITS)
#define FIRST_CAPACITY 16u
#define SMALL_CAPACITY 512u
#define LINE_BYTES 64

typedef struct __attribute__((packed)) {
    uint64_t key;
    uint32_t tag;
    uint64_t extra; /* not there in tables without extras */
} Entry;

#define PLAIN_ENTRY offsetof(Entry, extra)

typedef struct {
    unsigned char *entries;
    uint32_t capacity;
    uint32_t used;
    uint32_t stride; /* from an entry to the next one, in bytes */
} Shard;

typedef struct {
    Shard shards[SHARDS];
    uint64_t secret;
    size_t used;
    bool has_extras;
    bool doubles; /* however large it is; false: see table_grown */
} Table;

/* A slot of a table; valid until the next insertion into the table or removal from it. */
typedef struct {
    Shard *shard; /* NULL: there is none */
    uint32_t at;
} Slot;

/* Where a key that a table does not have would be; valid as long as a slot. */
typedef struct {
    uint64_t hash;
    uint32_t at;
} Gap;

static inline uint64_t mix64(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return x;
}

static inline Entry *entry_at(const Shard *shard, uint32_t at) {
    return (Entry *)(shard->entries + (size_t)at * shard->stride);
}

static inline Entry *entry_of(Slot slot) { return entry_at(slot.shard, slot.at); }

static inline uint32_t table_home(const Shard *shard, uint64_t hash) {
    return (uint32_t)(((hash & 0xffffffffu) * shard->capacity) >> 32);
}

static inline Shard *table_shard(Table *table, uint64_t hash) {
    return &table->shards[hash >> (64 - SHARD_BITS)];
}

static inline void table_init(Table *table, uint64_t secret, bool has_extras) {
    memset(table, 0, sizeof *table);
    table->secret = secret;
    table->has_extras = has_extras;
}

static inline void table_clear(Table *table) {
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &table->shards[n];
        free(shard->entries);
        memset(shard, 0, sizeof *shard);
    }
    table->used = 0;
}

static inline size_t table_bytes(const Table *table) {
    size_t bytes = 0;
    for (unsigned n = 0; n < SHARDS; n++)
        bytes += (size_t)table->shards[n].capacity * table->shards[n].stride;
    return bytes;
}

/* Inlined always: gcc takes a call that only prefetches for one without effect, and drops it. */
static inline __attribute__((always_inline)) void table_prefetch(Table *table, uint64_t key) {
    uint64_t hash = mix64(key ^ table->secret);
    Shard *shard = table_shard(table, hash);
    if (!shard->capacity) return;
    const unsigned char *entry = (unsigned char *)entry_at(shard, table_home(shard, hash));
    __builtin_prefetch(entry);
    __builtin_prefetch(entry + LINE_BYTES);
}

/* Finds a key; if the table does not have it, `gap` is where it would be. */
static inline Slot table_seek(Table *table, uint64_t key, Gap *gap) {
    gap->hash = mix64(key ^ table->secret);
    Shard *shard = table_shard(table, gap->hash);
    gap->at = 0;
    if (shard->capacity) {
        uint32_t at = table_home(shard, gap->hash);
        while (entry_at(shard, at)->tag) {
            if (entry_at(shard, at)->key == key) return (Slot){shard, at};
            if (++at == shard->capacity) at = 0;
        }
        gap->at = at;
    }
    return (Slot){NULL, 0};
}

static inline Slot table_find(Table *table, uint64_t key) {
    Gap gap;
    return table_seek(table, key, &gap);
}

/* The first free slot for a key that a shard does not have yet; the shard must have room. */
static inline uint32_t table_gap(const Shard *shard, uint64_t hash) {
    uint32_t at = table_home(shard, hash);
    while (entry_at(shard, at)->tag)
        if (++at == shard->capacity) at = 0;
    return at;
}

/* Capacity that follows: small shards double, so that a block is seldom moved; large ones grow by a
 * quarter, since memory counts there. */
static inline uint32_t table_grown(uint32_t capacity, bool doubles) {
    if (capacity < FIRST_CAPACITY) return FIRST_CAPACITY;
    return capacity + (doubles || capacity < SMALL_CAPACITY ? capacity : capacity / 4);
}

static inline bool table_grow(Table *table, Shard *old) {
    if (old->capacity > UINT32_MAX / 2) return false;
    Shard grown = {.capacity = table_grown(old->capacity, table->doubles), .used = old->used,
                   .stride = table->has_extras ? sizeof(Entry) : PLAIN_ENTRY};
    grown.entries = calloc(grown.capacity, grown.stride);
    if (!grown.entries) return false;
    for (uint32_t n = 0; n < old->capacity; n++) {
        const Entry *entry = entry_at(old, n);
        if (!entry->tag) continue;
        uint32_t at = table_gap(&grown, mix64(entry->key ^ table->secret));
        memcpy(entry_at(&grown, at), entry, grown.stride);
    }
    free(old->entries);
    *old = grown;
    return true;
}

/* Adds a key that was sought in vain; if out of memory, returns no slot, and nothing has changed. */
static inline Slot table_fill(Table *table, uint64_t key, uint32_t tag, Gap gap) {
    Shard *shard = table_shard(table, gap.hash);
    /* at most four fifths full; the loops above rely on an empty slot */
    if ((uint64_t)(shard->used + 1) * 5 > (uint64_t)shard->capacity * 4) {
        if (!table_grow(table, shard)) return (Slot){NULL, 0};
        gap.at = table_gap(shard, gap.hash);
    }
    Entry *entry = entry_at(shard, gap.at);
    entry->key = key;
    entry->tag = tag;
    if (table->has_extras) entry->extra = 0;
    shard->used++;
    table->used++;
    return (Slot){shard, gap.at};
}

/* Adds a new key; if out of memory, returns no slot, and nothing has changed. */
static inline Slot table_add(Table *table, uint64_t key, uint32_t tag) {
    Gap gap;
    table_seek(table, key, &gap);
    return table_fill(table, key, tag, gap);
}

/* Empties a slot and moves displaced entries up, so that no tombstones are needed. */
static inline void table_remove(Table *table, Slot slot) {
    Shard *shard = slot.shard;
    uint32_t hole = slot.at, at = slot.at;
    for (;;) {
        if (++at == shard->capacity) at = 0;
        const Entry *entry = entry_at(shard, at);
        if (!entry->tag) break;
        uint32_t home = table_home(shard, mix64(entry->key ^ table->secret));
        bool stays = hole <= at ? (home > hole && home <= at) : (home > hole || home <= at);
        if (stays) continue;
        memcpy(entry_at(shard, hole), entry, shard->stride);
        hole = at;
    }
    entry_at(shard, hole)->tag = 0;
    shard->used--;
    table->used--;
}

#endif
