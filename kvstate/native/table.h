/* A map from 64-bit keys to small values that grows without long pauses.
 *
 * Open addressing with linear probing, split over shards that grow one by one: the longest pause is
 * the rehash of one shard. A slot is empty when its tag is 0, so tags are counts or ids from 1 on.
 * An optional second value (extra) is in a separate array.
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

typedef struct {
    uint64_t *keys;
    uint64_t *extras; /* NULL in tables without extras */
    uint32_t *tags;
    uint32_t capacity;
    uint32_t used;
} Shard;

typedef struct {
    Shard shards[SHARDS];
    uint64_t secret;
    size_t used;
    bool has_extras;
} Table;

/* A slot of a table; valid until the next insertion into the table or removal from it. */
typedef struct {
    Shard *shard; /* NULL: there is none */
    uint32_t at;
} Slot;

static inline uint64_t mix64(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return x;
}

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
        free(shard->keys);
        free(shard->extras);
        free(shard->tags);
        memset(shard, 0, sizeof *shard);
    }
    table->used = 0;
}

static inline size_t table_bytes(const Table *table) {
    size_t slot = sizeof(uint64_t) * (table->has_extras ? 2 : 1) + sizeof(uint32_t);
    size_t bytes = 0;
    for (unsigned n = 0; n < SHARDS; n++) bytes += table->shards[n].capacity * slot;
    return bytes;
}

static inline void table_prefetch(Table *table, uint64_t key) {
    uint64_t hash = mix64(key ^ table->secret);
    Shard *shard = table_shard(table, hash);
    if (shard->capacity) {
        uint32_t at = table_home(shard, hash);
        __builtin_prefetch(&shard->keys[at]);
        __builtin_prefetch(&shard->tags[at]);
    }
}

static inline Slot table_find(Table *table, uint64_t key) {
    uint64_t hash = mix64(key ^ table->secret);
    Shard *shard = table_shard(table, hash);
    if (shard->capacity) {
        uint32_t at = table_home(shard, hash);
        while (shard->tags[at]) {
            if (shard->keys[at] == key) return (Slot){shard, at};
            if (++at == shard->capacity) at = 0;
        }
    }
    return (Slot){NULL, 0};
}

/* Adds a key that a shard does not have yet; the shard must have room. */
static inline uint32_t table_place(Shard *shard, uint64_t key, uint64_t hash, uint32_t tag) {
    uint32_t at = table_home(shard, hash);
    while (shard->tags[at])
        if (++at == shard->capacity) at = 0;
    shard->keys[at] = key;
    shard->tags[at] = tag;
    shard->used++;
    return at;
}

static inline bool table_grow(Table *table, Shard *old) {
    if (old->capacity > UINT32_MAX / 2) return false;
    Shard grown = {0};
    grown.capacity = old->capacity ? old->capacity + old->capacity / 4 : FIRST_CAPACITY;
    grown.keys = malloc(grown.capacity * sizeof *grown.keys);
    grown.extras = table->has_extras ? malloc(grown.capacity * sizeof *grown.extras) : NULL;
    grown.tags = calloc(grown.capacity, sizeof *grown.tags);
    if (!grown.keys || !grown.tags || (table->has_extras && !grown.extras)) {
        free(grown.keys);
        free(grown.extras);
        free(grown.tags);
        return false;
    }
    for (uint32_t n = 0; n < old->capacity; n++) {
        if (!old->tags[n]) continue;
        uint64_t hash = mix64(old->keys[n] ^ table->secret);
        uint32_t at = table_place(&grown, old->keys[n], hash, old->tags[n]);
        if (grown.extras) grown.extras[at] = old->extras[n];
    }
    free(old->keys);
    free(old->extras);
    free(old->tags);
    *old = grown;
    return true;
}

/* Adds a new key; if out of memory, returns no slot, and nothing has changed. */
static inline Slot table_add(Table *table, uint64_t key, uint32_t tag) {
    uint64_t hash = mix64(key ^ table->secret);
    Shard *shard = table_shard(table, hash);
    /* at most four fifths full; the loops above rely on an empty slot */
    if ((uint64_t)(shard->used + 1) * 5 > (uint64_t)shard->capacity * 4 && !table_grow(table, shard))
        return (Slot){NULL, 0};
    uint32_t at = table_place(shard, key, hash, tag);
    if (shard->extras) shard->extras[at] = 0;
    table->used++;
    return (Slot){shard, at};
}

/* Empties a slot and moves displaced entries up, so that no tombstones are needed. */
static inline void table_remove(Table *table, Slot slot) {
    Shard *shard = slot.shard;
    uint32_t hole = slot.at, at = slot.at;
    for (;;) {
        if (++at == shard->capacity) at = 0;
        if (!shard->tags[at]) break;
        uint32_t home = table_home(shard, mix64(shard->keys[at] ^ table->secret));
        bool stays = hole <= at ? (home > hole && home <= at) : (home > hole || home <= at);
        if (stays) continue;
        shard->keys[hole] = shard->keys[at];
        shard->tags[hole] = shard->tags[at];
        if (shard->extras) shard->extras[hole] = shard->extras[at];
        hole = at;
    }
    shard->tags[hole] = 0;
    shard->used--;
    table->used--;
}

#endif
