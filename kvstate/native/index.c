#include "rows.h"

bool index_widen(Index *index, uint32_t block_size) {
    if (block_size <= index->lane_count) return true;
    uint64_t *lanes = realloc(index->lanes, block_size * sizeof *lanes);
    if (!lanes) return false;
    index->lanes = lanes;
    for (uint32_t n = index->lane_count; n < block_size; n++)
        lanes[n] = mix64(index->secret + (n + 1) * 0x9e3779b97f4a7c15u) | 1;
    index->lane_count = block_size;
    return true;
}

bool index_init(Index *index, uint64_t secret, size_t limit_blocks) {
    memset(index, 0, sizeof *index);
    index->secret = secret;
    index->limit_blocks = limit_blocks;
    table_init(&index->rows, mix64(secret + 1), false);
    table_init(&index->sharers, mix64(secret + 2), false);
    sets_init(&index->sets);
    return index_widen(index, 64);
}

static void pool_free(Pool *pool) {
    for (int segment = 0; segment < SEGMENTS; segment++) table_clear(&pool->blocks[segment]);
    free(pool);
}

static void owner_free(Owner *owner) {
    for (uint32_t n = 0; n < owner->pool_count; n++) pool_free(owner->pools[n]);
    free(owner->pools);
    owner->pools = NULL;
    owner->pool_count = 0;
}

void index_free(Index *index) {
    for (uint32_t n = 0; n < index->owner_count; n++) {
        owner_free(&index->owners[n]);
        free(index->owners[n].watches);
        free(index->owners[n].removals);
        groups_forget(&index->owners[n].groups);
        ends_free(index, n);
    }
    for (uint32_t n = 0; n < index->model_count; n++) free(index->models[n].sizes);
    free(index->owners);
    free(index->models);
    free(index->lanes);
    free(index->keys);
    table_clear(&index->rows);
    table_clear(&index->sharers);
    sets_free(&index->sets);
}

size_t index_bytes(const Index *index) {
    size_t bytes = table_bytes(&index->rows) + table_bytes(&index->sharers);
    bytes += sets_bytes(&index->sets);
    for (uint32_t n = 0; n < index->owner_count; n++) {
        const Owner *owner = &index->owners[n];
        if (owner->ends) bytes += sizeof *owner->ends + table_bytes(&owner->ends->entries);
        if (owner->removals) bytes += index->removal_room * sizeof *owner->removals;
        for (uint32_t pool = 0; pool < owner->pool_count; pool++)
            for (int segment = 0; segment < SEGMENTS; segment++)
                bytes += table_bytes(&owner->pools[pool]->blocks[segment]);
    }
    return bytes;
}

uint32_t index_add_model(Index *index, uint64_t seed) {
    Model *models = realloc(index->models, (index->model_count + 1) * sizeof *models);
    if (!models) return UINT32_MAX;
    index->models = models;
    models[index->model_count] = (Model){.seed = seed};
    return index->model_count++;
}

uint32_t index_add_owner(Index *index, uint32_t worker, uint32_t model, uint32_t rank) {
    uint32_t at = 0;
    while (at < index->owner_count && index->owners[at].present) at++;
    if (at == index->owner_count) {
        Owner *owners = realloc(index->owners, (at + 1) * sizeof *owners);
        if (!owners) return UINT32_MAX;
        index->owners = owners;
        index->owner_count++;
    }
    index->owners[at] = (Owner){.present = true, .worker = worker, .model = model,
                                .rank = rank, .names_salts = -1, .names_loras = -1,
                                .removing = REMOVING_MEDIA, .age = 1, .mark = 1,
                                .limit_blocks = index->limit_blocks};
    return at;
}

/* Whether only the removal of another copy made this uncertain block so, since the last hole. */
static bool is_marked(const Owner *owner, uint32_t tag) {
    return owner->mark && tag >> MARK_SHIFT == owner->mark;
}

static bool has_medium(uint32_t media, uint32_t medium) { return media >> medium & 1; }

static bool is_doubted(const Owner *owner, uint32_t medium) {
    return has_medium(owner->aging & ~owner->removing, medium);
}

/* Notes that removals from this medium are announced. */
static void note_removals(Owner *owner, uint32_t medium) {
    if (has_medium(owner->removing, medium)) return;
    owner->removing |= 1u << medium;
    owner->doubted = 0;
    for (uint32_t tier = 0; tier < TIERS; tier++)
        if (owner->aging_on[tier] & ~owner->removing) owner->doubted |= 1u << tier;
}

void index_forget_media(Index *index, uint32_t number) {
    index->owners[number].removing = REMOVING_MEDIA;
    index->owners[number].copies_announced = false;
}

static SizeInUse *size_find(Model *model, uint32_t block_size) {
    for (uint32_t n = 0; n < model->size_count; n++)
        if (model->sizes[n].block_size == block_size) return &model->sizes[n];
    return NULL;
}

/* Counts a pool of this size; returns false if out of memory. */
static bool size_use(Model *model, uint32_t block_size) {
    SizeInUse *size = size_find(model, block_size);
    if (!size) {
        SizeInUse *sizes = realloc(model->sizes, (model->size_count + 1) * sizeof *sizes);
        if (!sizes) return false;
        model->sizes = sizes;
        size = &sizes[model->size_count++];
        *size = (SizeInUse){.block_size = block_size};
    }
    size->pools++;
    return true;
}

/* Counts a pool less; a size without pools is not looked up any more. */
static void size_leave(Model *model, uint32_t block_size) {
    SizeInUse *size = size_find(model, block_size);
    if (!--size->pools) *size = model->sizes[--model->size_count];
}

static Pool *pool_find(Owner *owner, const PoolName *name) {
    for (uint32_t n = 0; n < owner->pool_count; n++) {
        Pool *pool = owner->pools[n];
        if (pool->medium == name->medium && pool->group == name->group &&
            pool->block_size == name->block_size)
            return pool;
    }
    return NULL;
}

static bool pool_is_before(const Pool *pool, const PoolName *name) {
    if (pool->medium != name->medium) return pool->medium < name->medium;
    if (pool->group != name->group) return pool->group < name->group;
    return pool->block_size < name->block_size;
}

#define SHARDS_OF_POOL (SEGMENTS * SHARDS)

/* Makes room for a new pool; moves later pools up, and returns the new one's position. */
static uint32_t make_place(Owner *owner, const PoolName *name) {
    uint32_t at = owner->pool_count++;
    for (; at && !pool_is_before(owner->pools[at - 1], name); at--)
        owner->pools[at] = owner->pools[at - 1];
    if (at * SHARDS_OF_POOL <= owner->swept) owner->swept += SHARDS_OF_POOL; /* it has no old block */
    return at;
}

/* Frees an empty pool; later ones move down. */
static void pool_drop(Index *index, Owner *owner, uint32_t at) {
    uint32_t begin = at * SHARDS_OF_POOL;
    if (owner->swept >= begin + SHARDS_OF_POOL) {
        owner->swept -= SHARDS_OF_POOL;
    } else if (owner->swept >= begin) {
        owner->swept = begin;
        owner->swept_slot = 0;
    }
    size_leave(&index->models[owner->model], owner->pools[at]->block_size);
    pool_free(owner->pools[at]);
    owner->pool_count--;
    for (; at < owner->pool_count; at++) owner->pools[at] = owner->pools[at + 1];
}

static bool pool_is_empty(const Pool *pool) {
    return !pool->blocks[0].used && !pool->blocks[1].used;
}

static void drop_empty_pools(Index *index, Owner *owner) {
    for (uint32_t at = owner->pool_count; at--;)
        if (pool_is_empty(owner->pools[at])) pool_drop(index, owner, at);
}

static IndexResult pool_make(Index *index, Owner *owner, const PoolName *name, Pool **made) {
    if (owner->pool_count == MAX_POOLS) return INDEX_OVER_LIMIT;
    Pool **pools = realloc(owner->pools, (owner->pool_count + 1) * sizeof *pools);
    if (!pools) return INDEX_NO_MEMORY;
    owner->pools = pools;
    Pool *pool = malloc(sizeof *pool);
    if (!pool || !size_use(&index->models[owner->model], name->block_size)) {
        free(pool);
        return INDEX_NO_MEMORY;
    }
    *pool = (Pool){.medium = name->medium, .group = name->group, .block_size = name->block_size,
                   .tier = name->tier};
    for (int segment = 0; segment < SEGMENTS; segment++)
        /* a secret for each: blocks moved in the order of one table would cluster in the other */
        table_init(&pool->blocks[segment], mix64(index->secret + 3 + segment), true);
    owner->pools[make_place(owner, name)] = pool;
    if (!has_medium(owner->removing, name->medium)) {
        owner->aging |= 1u << name->medium;
        owner->aging_on[name->tier] |= 1u << name->medium;
        owner->doubted |= 1u << name->tier;
    }
    *made = pool;
    return INDEX_OK;
}

static void count_block(Index *index, Owner *owner, const Pool *pool, int change) {
    owner->blocks += change;
    size_find(&index->models[owner->model], pool->block_size)->blocks += change;
}

/* Whether ends of other groups may belong to blocks of this pool and segment. */
static bool has_ends(const Owner *owner, const Pool *pool, uint32_t segment) {
    return owner->ends && segment == owner->certain && !pool->tier;
}

/* Drops all copies of the hash in this slot. */
static void forget(Index *index, uint32_t owner, Pool *pool, uint32_t segment, Slot slot) {
    if (has_ends(&index->owners[owner], pool, segment))
        ends_drop_block(index, owner, entry_of(slot)->key, entry_of(slot)->extra);
    row_release(index, index_holder(owner, segment, pool->tier), entry_of(slot)->extra);
    table_remove(&pool->blocks[segment], slot);
    count_block(index, &index->owners[owner], pool, -1);
}

/* Adds the copies of a tag to those of another; `again` is MAY_BE_FEWER or 0. */
static uint32_t add_copies(uint32_t tag, uint32_t added, uint32_t again) {
    uint32_t copies = (tag & MAX_COPIES) + (added & MAX_COPIES);
    return (copies > MAX_COPIES ? MAX_COPIES : copies) | (tag & MAY_BE_FEWER) | again;
}

/* Adds the copies in `tag` (on an aging medium: sets the age); `again` is MAY_BE_FEWER if a block
 * that is held may not have another copy now, or 0. Returns false if out of memory. */
static bool hold(Index *index, uint32_t number, Pool *pool, uint32_t segment, uint64_t hash,
                 uint64_t key, uint32_t tag, uint32_t again) {
    Owner *owner = &index->owners[number];
    Table *blocks = &pool->blocks[segment];
    index->work += 4;
    Gap gap;
    Slot slot = table_seek(blocks, hash, &gap);
    if (slot.shard && entry_of(slot)->extra == key) {
        if (!has_medium(owner->aging, pool->medium))
            tag = add_copies(entry_of(slot)->tag, tag, again);
        entry_of(slot)->tag = tag;
        return true;
    }
    if (slot.shard) {
        owner->restored_with_other_tokens++;
        forget(index, number, pool, segment, slot);
        table_seek(blocks, hash, &gap);
    }
    slot = table_fill(blocks, hash, tag, gap);
    if (!slot.shard) return false;
    entry_of(slot)->extra = key;
    if (!row_hold(index, index_holder(number, segment, pool->tier), key)) {
        table_remove(blocks, slot);
        return false;
    }
    count_block(index, owner, pool, 1);
    if (has_ends(owner, pool, segment)) ends_hold_block(index, number, pool, hash, key);
    return true;
}

const Pool *index_find_key(Index *index, Owner *owner, uint64_t hash, uint32_t *segment,
                           uint64_t *key) {
    for (int uncertain = 0; uncertain < SEGMENTS; uncertain++) {
        *segment = owner->certain ^ uncertain;
        index->work += owner->pool_count;
        for (uint32_t n = 0; n < owner->pool_count; n++) {
            Slot slot = table_find(&owner->pools[n]->blocks[*segment], hash);
            if (slot.shard) {
                *key = entry_of(slot)->extra;
                if (uncertain && !has_medium(owner->aging, owner->pools[n]->medium) &&
                    is_marked(owner, entry_of(slot)->tag))
                    *segment = owner->certain; /* its chain was stored since the hole */
                return owner->pools[n];
            }
        }
    }
    return NULL;
}

static IndexResult store_block(Index *index, uint32_t number, Pool *pool, uint32_t segment,
                               uint64_t hash, uint64_t key, uint32_t again) {
    Owner *owner = &index->owners[number];
    if (segment == owner->certain && pool->blocks[segment ^ 1].used) { /* again, after the hole */
        Slot old = table_find(&pool->blocks[segment ^ 1], hash);
        if (old.shard) forget(index, number, pool, segment ^ 1, old);
    }
    uint32_t tag = has_medium(owner->aging, pool->medium) ? owner->age : 1;
    if (owner->watched) watch_stored(owner, key);
    bool is_held = hold(index, number, pool, segment, hash, key, tag, again);
    return is_held ? INDEX_OK : INDEX_NO_MEMORY;
}

/* Makes room for the keys of a chain; returns false if out of memory. */
static bool keys_widen(Index *index, uint32_t count) {
    if (count <= index->key_room) return true;
    uint64_t *keys = realloc(index->keys, count * sizeof *keys);
    if (!keys) return false;
    index->keys = keys;
    index->key_room = count;
    return true;
}

static uint64_t number_at(const unsigned char *numbers, uint32_t n) {
    uint64_t number;
    memcpy(&number, numbers + (size_t)n * sizeof number, sizeof number);
    return number;
}

/* More than these are not waited for at once anyway. */
#define MAX_FETCHED 32u

void index_fetch(Index *index, uint32_t number, const PoolName *name, const unsigned char *hashes,
                 uint32_t count) {
    const Owner *owner = &index->owners[number];
    for (uint32_t at = 0; at < owner->pool_count; at++) {
        Pool *pool = owner->pools[at];
        if (pool->medium != name->medium || pool->group != name->group) continue;
        for (uint32_t n = 0; n < count && n < MAX_FETCHED; n++)
            table_prefetch(&pool->blocks[owner->certain], number_at(hashes, n));
    }
}

void index_fetch_rows(Index *index, const unsigned char *keys, uint32_t count) {
    for (uint32_t n = 0; n < count && n < MAX_FETCHED; n++)
        table_prefetch(&index->rows, number_at(keys, n));
}

void index_fetch_rows_held(Index *index, uint32_t number, const PoolName *name,
                           const unsigned char *hashes, uint32_t count) {
    const Owner *owner = &index->owners[number];
    for (uint32_t at = 0; at < owner->pool_count; at++) {
        Pool *pool = owner->pools[at];
        if (pool->medium != name->medium || pool->group != name->group) continue;
        for (uint32_t n = 0; n < count && n < MAX_FETCHED; n++) {
            Slot slot = table_find(&pool->blocks[owner->certain], number_at(hashes, n));
            if (slot.shard) table_prefetch(&index->rows, entry_of(slot)->extra);
        }
    }
}

IndexResult index_store(Index *index, uint32_t number, const Stored *stored) {
    Owner *owner = &index->owners[number];
    uint32_t block_size = stored->pool.block_size, segment = owner->certain;
    owner->block_size = block_size;
    uint64_t key = index_root(index, owner->model, stored->lora, block_size);
    if (stored->has_parent && !index_find_key(index, owner, stored->parent, &segment, &key))
        return INDEX_UNKNOWN_PARENT;
    if (index_is_full(owner, (size_t)stored->count + stored->following)) {
        owner->over_limit++;
        return INDEX_OVER_LIMIT;
    }
    if (!index_widen(index, block_size) || !keys_widen(index, stored->count))
        return INDEX_NO_MEMORY;
    index_fetch(index, number, &stored->pool, (const unsigned char *)stored->hashes, stored->count);
    for (uint32_t n = 0; n < stored->count; n++) {
        const uint32_t *tokens = stored->tokens + (size_t)n * block_size;
        uint64_t extra = stored->extras ? stored->extras[n] : 0;
        index->keys[n] = key = index_child(index, key, tokens, block_size, extra);
        if (n < MAX_FETCHED) table_prefetch(&index->rows, key);
    }
    index->work += (uint64_t)stored->count * (block_size / 32);
    index->keyed = (Keyed){.pool = stored->pool, .count = stored->count,
                           .is_uncertain = segment != owner->certain,
                           .may_repeat = stored->may_repeat};
    return index_store_keyed(index, number, &index->keyed, (const unsigned char *)stored->hashes,
                             (const unsigned char *)index->keys);
}

IndexResult index_store_keyed(Index *index, uint32_t number, const Keyed *chain,
                              const unsigned char *hashes, const unsigned char *keys) {
    Owner *owner = &index->owners[number];
    uint32_t segment = owner->certain ^ chain->is_uncertain;
    uint32_t again = chain->may_repeat ? MAY_BE_FEWER : 0;
    owner->block_size = chain->pool.block_size;
    Pool *pool = pool_find(owner, &chain->pool);
    IndexResult result = INDEX_OK;
    if (index_is_full(owner, chain->count))
        result = INDEX_OVER_LIMIT;
    else if (!pool)
        result = pool_make(index, owner, &chain->pool, &pool);
    for (uint32_t n = 0; n < chain->count && result == INDEX_OK; n++)
        result = store_block(index, number, pool, segment, number_at(hashes, n),
                             number_at(keys, n), again);
    if (result == INDEX_OVER_LIMIT) owner->over_limit++;
    return result;
}

static IndexResult copy_block(Index *index, uint32_t number, PoolName name, uint64_t hash) {
    Owner *owner = &index->owners[number];
    uint32_t segment;
    uint64_t key;
    const Pool *source = index_find_key(index, owner, hash, &segment, &key);
    if (!source) {
        owner->copied_unknown++;
        return INDEX_OK;
    }
    if (name.tier == HOST_TIER) note_removals(owner, name.medium);
    if (index_is_full(owner, 1)) return INDEX_OVER_LIMIT;
    name.block_size = source->block_size;
    Pool *pool = pool_find(owner, &name);
    IndexResult result = pool ? INDEX_OK : pool_make(index, owner, &name, &pool);
    return result == INDEX_OK ? store_block(index, number, pool, segment, hash, key, 0) : result;
}

IndexResult index_copy(Index *index, uint32_t number, const PoolName *pool, const uint64_t *hashes,
                       uint32_t count) {
    IndexResult result = INDEX_OK;
    for (uint32_t n = 0; n < count && result == INDEX_OK; n++)
        result = copy_block(index, number, *pool, hashes[n]);
    if (result == INDEX_OVER_LIMIT) index->owners[number].over_limit++;
    return result;
}

static IndexResult lend_block(Index *index, uint32_t number, uint32_t lender, PoolName name,
                              uint64_t hash, uint32_t *lent) {
    Owner *owner = &index->owners[number], *from = &index->owners[lender];
    uint32_t segment;
    uint64_t key;
    const Pool *source = index_find_key(index, from, hash, &segment, &key);
    if (!source) {
        owner->copied_unknown++;
        return INDEX_OK;
    }
    if (index_is_full(owner, 1)) return INDEX_OVER_LIMIT;
    name.block_size = owner->block_size = source->block_size;
    segment = segment == from->certain ? owner->certain : owner->certain ^ 1;
    Pool *pool = pool_find(owner, &name);
    IndexResult result = pool ? INDEX_OK : pool_make(index, owner, &name, &pool);
    if (result == INDEX_OK) result = store_block(index, number, pool, segment, hash, key, 0);
    *lent += result == INDEX_OK;
    return result;
}

IndexResult index_lend(Index *index, uint32_t number, uint32_t lender, const PoolName *pool,
                       const uint64_t *hashes, uint32_t count, uint32_t *lent) {
    IndexResult result = INDEX_OK;
    for (uint32_t n = 0; n < count && result == INDEX_OK; n++)
        result = lend_block(index, number, lender, *pool, hashes[n], lent);
    if (result == INDEX_OVER_LIMIT) index->owners[number].over_limit++;
    return result;
}

/* Makes what is left of a certain block uncertain; of a block in both segments, these copies are
 * kept. Without memory it is forgotten. */
static void doubt(Index *index, uint32_t number, Pool *pool, Slot slot, uint32_t tag) {
    uint32_t certain = index->owners[number].certain;
    uint64_t hash = entry_of(slot)->key, key = entry_of(slot)->extra;
    forget(index, number, pool, certain, slot);
    Slot old = table_find(&pool->blocks[certain ^ 1], hash);
    if (old.shard) forget(index, number, pool, certain ^ 1, old);
    hold(index, number, pool, certain ^ 1, hash, key, tag, 0);
}

/* Drops a copy of a block that has several, or whose copies left are told. */
static void drop_copy(Index *index, uint32_t number, Pool *pool, uint32_t segment, Slot slot,
                      uint32_t left) {
    Owner *owner = &index->owners[number];
    if (left != NOT_TOLD) {
        entry_of(slot)->tag = left > MAX_COPIES ? MAX_COPIES : left;
        return;
    }
    uint32_t tag = entry_of(slot)->tag - 1; /* its mark stays */
    bool is_believed = owner->copies_announced && !(tag & MAY_BE_FEWER);
    if (segment == owner->certain && !is_believed)
        doubt(index, number, pool, slot, tag | owner->mark << MARK_SHIFT);
    else
        entry_of(slot)->tag = tag;
}

void index_announce_copies(Owner *owner) {
    if (owner->copies_announced) return;
    owner->copies_announced = true;
    owner->restoring = 2; /* this age may have begun */
}

/* Removes a block, or a copy of it. */
static void remove_from(Index *index, uint32_t number, uint32_t at, uint32_t segment, Slot slot,
                        uint32_t left) {
    Owner *owner = &index->owners[number];
    Pool *pool = owner->pools[at];
    bool is_aging = has_medium(owner->aging, pool->medium);
    uint32_t tag = entry_of(slot)->tag, copies = is_aging ? 1 : tag & MAX_COPIES;
    if (!is_aging && left == NOT_TOLD && is_marked(owner, tag))
        index_announce_copies(owner); /* removed twice, without a store between */
    if (left == NOT_TOLD ? copies == 1 : !left) {
        owner->removed_certain += segment == owner->certain;
        if (index->removal_room) removals_note(index, owner, entry_of(slot)->extra);
        forget(index, number, pool, segment, slot);
        if (pool_is_empty(pool)) pool_drop(index, owner, at);
    } else if (!is_aging) {
        drop_copy(index, number, pool, segment, slot, left);
    }
}

bool index_remove(Index *index, uint32_t number, uint32_t medium, int64_t group, uint64_t hash,
                  uint32_t left) {
    Owner *owner = &index->owners[number];
    note_removals(owner, medium);
    for (int uncertain = 0; uncertain < SEGMENTS; uncertain++) {
        uint32_t segment = owner->certain ^ uncertain;
        index->work += 1 + owner->pool_count / 8;
        for (uint32_t n = 0; n < owner->pool_count; n++) {
            Pool *pool = owner->pools[n];
            if (pool->medium != medium || pool->group != group) continue;
            index->work++;
            Slot slot = table_find(&pool->blocks[segment], hash);
            if (!slot.shard) continue;
            remove_from(index, number, n, segment, slot, left);
            return true;
        }
    }
    return false;
}

/* Makes a marked block certain again, unless the copies left may be none. Returns false if it stays
 * as it is, also if out of memory. */
static bool restore(Index *index, uint32_t number, Pool *pool, Slot slot) {
    uint32_t certain = index->owners[number].certain, tag = entry_of(slot)->tag;
    uint64_t hash = entry_of(slot)->key, key = entry_of(slot)->extra;
    if (tag & MAY_BE_FEWER) return false;
    if (!hold(index, number, pool, certain, hash, key, tag & MAX_COPIES, 0)) return false;
    forget(index, number, pool, certain ^ 1, slot);
    return true;
}

bool index_expire(Index *index, uint32_t number, size_t slots) {
    Owner *owner = &index->owners[number];
    for (; owner->swept < owner->pool_count * SHARDS_OF_POOL; owner->swept++, owner->swept_slot = 0) {
        Pool *pool = owner->pools[owner->swept / SHARDS_OF_POOL];
        uint32_t segment = owner->swept / SHARDS % SEGMENTS;
        Shard *shard = &pool->blocks[segment].shards[owner->swept % SHARDS];
        bool is_old = is_doubted(owner, pool->medium);
        bool may_be_marked = owner->restoring && segment != owner->certain &&
                             !has_medium(owner->aging, pool->medium);
        if (!is_old && !may_be_marked) continue;
        while (owner->swept_slot < shard->capacity) {
            if (!slots--) return false;
            Slot slot = {shard, owner->swept_slot}; /* another may have moved up here */
            uint32_t tag = entry_at(shard, slot.at)->tag;
            if (is_old && tag && tag < owner->age)
                forget(index, number, pool, segment, slot);
            else if (!may_be_marked || !is_marked(owner, tag) ||
                     !restore(index, number, pool, slot))
                owner->swept_slot++;
        }
    }
    owner->swept = owner->swept_slot = 0;
    owner->age++;
    owner->restoring -= owner->restoring > 0;
    drop_empty_pools(index, owner);
    return true;
}

/* Empties a pool's table for segment `from`, beginning at the ends of its shards, where nothing has
 * to move up; moves its blocks to segment `to`, if that is another one. */
static IndexResult empty_segment(Index *index, uint32_t number, Pool *pool, uint32_t from,
                                 uint32_t to) {
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &pool->blocks[from].shards[n];
        index->work++;
        for (uint32_t at = shard->capacity; at-- && shard->used;) {
            if (!(at % 1024)) index->work++;
            if (!entry_at(shard, at)->tag) continue;
            if (to != from) {
                Slot old = table_find(&pool->blocks[to], entry_at(shard, at)->key);
                if (old.shard) forget(index, number, pool, to, old);
                if (!hold(index, number, pool, to, entry_at(shard, at)->key, entry_at(shard, at)->extra,
                          entry_at(shard, at)->tag, 0))
                    return INDEX_NO_MEMORY;
            }
            index->work += 4;
            forget(index, number, pool, from, (Slot){shard, at});
            if (index_is_over(index)) return INDEX_MORE;
            at++; /* another entry may have moved up here */
        }
    }
    table_clear(&pool->blocks[from]);
    return INDEX_OK;
}

IndexResult index_clear_some(Index *index, uint32_t number) {
    Owner *owner = &index->owners[number];
    if (ends_clear_some(index, number) == INDEX_MORE) return INDEX_MORE;
    for (uint32_t n = 0; n < owner->pool_count; n++)
        for (uint32_t segment = 0; segment < SEGMENTS; segment++)
            if (empty_segment(index, number, owner->pools[n], segment, segment) == INDEX_MORE)
                return INDEX_MORE;
    drop_empty_pools(index, owner);
    owner_free(owner);
    owner->aging = owner->doubted = owner->swept = owner->swept_slot = 0;
    memset(owner->aging_on, 0, sizeof owner->aging_on);
    owner->mark = 1;
    return INDEX_OK;
}

void index_clear(Index *index, uint32_t number) {
    index_begin(index, UINT64_MAX);
    index_clear_some(index, number);
}

void index_remove_owner(Index *index, uint32_t number) {
    index_clear(index, number);
    groups_forget(&index->owners[number].groups);
    ends_free(index, number);
    free(index->owners[number].watches);
    index->owners[number].watches = NULL;
    index->owners[number].watched = 0;
    free(index->owners[number].removals);
    index->owners[number].removals = NULL;
    index->owners[number].removal_count = 0;
    index->owners[number].present = false;
    index_note_cut(index, number);
}

static bool segment_is_empty(const Owner *owner, uint32_t segment) {
    for (uint32_t n = 0; n < owner->pool_count; n++)
        if (owner->pools[n]->blocks[segment].used) return false;
    return true;
}

/* After a hole a second removal proves nothing: a store between may have been lost. */
static void next_mark(Owner *owner) {
    if (owner->mark) owner->mark = owner->mark == MAX_MARK ? 0 : owner->mark + 1;
}

/* Moves certain blocks to the uncertain ones; of a block in both, the certain copies are kept. */
IndexResult index_demote_some(Index *index, uint32_t number) {
    Owner *owner = &index->owners[number];
    uint32_t from = owner->certain;
    if (ends_clear_some(index, number) == INDEX_MORE) return INDEX_MORE;
    if (segment_is_empty(owner, from ^ 1)) {
        owner->certain ^= 1;
        next_mark(owner);
        return INDEX_OK;
    }
    for (uint32_t n = 0; n < owner->pool_count; n++) {
        IndexResult result = empty_segment(index, number, owner->pools[n], from, from ^ 1);
        if (result == INDEX_NO_MEMORY)
            index_clear(index, number); /* better to know nothing than something wrong */
        if (result != INDEX_OK) return result;
    }
    next_mark(owner);
    return INDEX_OK;
}

size_t index_count_tier(const Index *index, uint32_t number, uint32_t tier, bool uncertain) {
    const Owner *owner = &index->owners[number];
    size_t count = 0;
    for (uint32_t n = 0; n < owner->pool_count; n++)
        if (owner->pools[n]->tier == tier)
            count += owner->pools[n]->blocks[owner->certain ^ uncertain].used;
    return count;
}

uint64_t index_hash_bytes(Index *index, const unsigned char *bytes, size_t length) {
    uint64_t hash = mix64(index->secret ^ length);
    for (size_t n = 0; n < length; n += 4) {
        uint32_t lane = 0;
        memcpy(&lane, bytes + n, length - n < 4 ? length - n : 4);
        hash = mix64(hash ^ (lane + 1ull) * index->lanes[n / 4 & 63]);
    }
    return hash | 1; /* 0 stands for nothing */
}

IndexResult index_put(Index *index, uint32_t number, const PoolName *name, uint32_t uncertain,
                      uint64_t hash, uint64_t key, uint32_t tag) {
    Owner *owner = &index->owners[number];
    uint32_t segment = owner->certain ^ uncertain;
    if (!tag) return INDEX_DAMAGED;
    if (index_is_full(owner, 1)) return INDEX_OVER_LIMIT;
    if (!index_widen(index, name->block_size)) return INDEX_NO_MEMORY;
    Pool *pool = pool_find(owner, name);
    IndexResult made = pool ? INDEX_OK : pool_make(index, owner, name, &pool);
    if (made != INDEX_OK) return made;
    bool is_aging = has_medium(owner->aging, name->medium);
    if (is_aging ? tag > owner->age : !(tag & MAX_COPIES)) return INDEX_DAMAGED;
    if (table_find(&pool->blocks[segment], hash).shard) return INDEX_DAMAGED;
    return hold(index, number, pool, segment, hash, key, tag, 0) ? INDEX_OK : INDEX_NO_MEMORY;
}
