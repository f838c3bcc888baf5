/* Verifies the invariants of index.h from the tables alone; for tests, and slow. */
#include "index.h"

static const char *check_pool(Index *index, uint32_t number, Pool *pool, uint32_t segment,
                              uint64_t *pairs) {
    Holder holder = index_holder(number, segment, pool->tier);
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &pool->blocks[segment].shards[n];
        for (uint32_t at = 0; at < shard->capacity; at++) {
            if (!entry_at(shard, at)->tag) continue;
            Slot row = table_find(&index->rows, entry_at(shard, at)->extra);
            if (!row.shard || !sets_contain(&index->sets, entry_of(row)->tag, holder))
                return "a held block is missing in its row";
            ++*pairs;
        }
    }
    return NULL;
}

/* Verifies the holders of complete classes for the blocks of one pool. */
static const char *check_ends(Index *index, uint32_t number, Pool *pool, uint64_t *pairs) {
    Owner *owner = &index->owners[number];
    Table *blocks = &pool->blocks[owner->certain];
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &owner->ends->entries.shards[n];
        for (uint32_t at = 0; at < shard->capacity; at++) {
            if (!entry_at(shard, at)->tag) continue;
            uint32_t classes = entry_at(shard, at)->tag & END_CLASSES;
            if (!entry_at(shard, at)->extra) return "an entry of ends has none";
            if (!owner->ends->is_linking && classes != ends_complete(owner->ends, entry_at(shard, at)->extra))
                return "an entry of ends links other classes than are complete";
            Slot block = table_find(blocks, entry_at(shard, at)->key);
            for (uint32_t class = 0; block.shard && class < MAX_END_CLASSES; class++) {
                if (!(classes >> class & 1)) continue;
                Slot row = table_find(&index->rows, entry_of(block)->extra);
                if (!row.shard || !sets_contain(&index->sets, entry_of(row)->tag,
                                                index_end_holder(number, class)))
                    return "a complete class is missing in its row";
                ++*pairs;
            }
        }
    }
    return NULL;
}

static const char *check_owner(Index *index, uint32_t number, uint64_t *pairs) {
    Owner *owner = &index->owners[number];
    size_t blocks = 0;
    for (uint32_t n = 0; n < owner->pool_count; n++) {
        if (owner->ends && !owner->pools[n]->tier) {
            const char *fault = check_ends(index, number, owner->pools[n], pairs);
            if (fault) return fault;
        }
        for (uint32_t segment = 0; segment < SEGMENTS; segment++) {
            const char *fault = check_pool(index, number, owner->pools[n], segment, pairs);
            if (fault) return fault;
            blocks += owner->pools[n]->blocks[segment].used;
        }
    }
    return blocks == owner->blocks ? NULL : "an owner miscounts its blocks";
}

static const char *check_rows(Index *index, uint64_t *memberships) {
    uint32_t *rows = calloc(index->sets.count + 1, sizeof *rows);
    if (!rows) return "no memory to check";
    const char *fault = NULL;
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &index->rows.shards[n];
        for (uint32_t at = 0; at < shard->capacity; at++) {
            if (!entry_at(shard, at)->tag) continue;
            rows[entry_at(shard, at)->tag]++;
            *memberships += index->sets.sets[entry_at(shard, at)->tag].length;
        }
    }
    for (uint32_t id = 1; id < index->sets.count; id++)
        if (rows[id] != index->sets.sets[id].rows) fault = "a set miscounts its rows";
    free(rows);
    return fault;
}

const char *index_check(Index *index) {
    uint64_t pairs = 0, memberships = 0, shared = 0, sized = 0, blocks = 0, pools = 0, used = 0;
    for (uint32_t n = 0; n < index->owner_count; n++) {
        const char *fault = check_owner(index, n, &pairs);
        if (fault) return fault;
        blocks += index->owners[n].blocks;
        pools += index->owners[n].pool_count;
    }
    const char *fault = check_rows(index, &memberships);
    if (fault) return fault;
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &index->sharers.shards[n];
        for (uint32_t at = 0; at < shard->capacity; at++)
            if (entry_at(shard, at)->tag) shared += entry_at(shard, at)->tag - 1;
    }
    for (uint32_t n = 0; n < index->model_count; n++)
        for (uint32_t size = 0; size < index->models[n].size_count; size++) {
            const SizeInUse *in_use = &index->models[n].sizes[size];
            if (!in_use->pools) return "a block size without pools is looked up";
            sized += in_use->blocks;
            used += in_use->pools;
        }
    if (pairs != memberships + shared) return "a row has a holder too many";
    if (used != pools) return "a model miscounts its pools";
    return sized == blocks ? NULL : "a model miscounts its blocks";
}
