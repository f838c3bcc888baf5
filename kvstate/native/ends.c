#include "rows.h"

/* Adds or drops the holders of these classes for one block. Returns false if out of memory, and
 * then none is added. */
static bool link_block(Index *index, uint32_t number, uint64_t key, uint32_t classes, bool adds) {
    uint32_t added = 0;
    for (uint32_t class = 0; class < MAX_END_CLASSES; class++) {
        if (!(classes >> class & 1)) continue;
        Holder holder = index_end_holder(number, class);
        index->work++;
        if (!adds) {
            row_release(index, holder, key);
        } else if (row_hold(index, holder, key)) {
            added |= 1u << class;
        } else {
            link_block(index, number, key, added, false);
            return false;
        }
    }
    return true;
}

/* The same for each certain block on the device under a hash, but those in one pool. */
static bool link_blocks(Index *index, uint32_t number, const Pool *but, uint64_t hash,
                        uint32_t classes, bool adds) {
    Owner *owner = &index->owners[number];
    for (uint32_t n = 0; classes && n < owner->pool_count; n++) {
        Pool *pool = owner->pools[n];
        Slot block = pool == but || pool->tier ? (Slot){0}
                                               : table_find(&pool->blocks[owner->certain], hash);
        if (!block.shard || link_block(index, number, entry_of(block)->extra, classes, adds))
            continue;
        while (n--) { /* those before it */
            pool = owner->pools[n];
            if (pool == but || pool->tier) continue;
            block = table_find(&pool->blocks[owner->certain], hash);
            if (block.shard)
                link_block(index, number, entry_of(block)->extra, classes, false);
        }
        return false;
    }
    return true;
}

/* Sets an entry's counts, and links what is complete now; an entry without any is removed. */
static void set_counts(Index *index, uint32_t number, Slot slot, uint64_t counts) {
    Ends *ends = index->owners[number].ends;
    uint64_t hash = entry_of(slot)->key;
    uint32_t old = entry_of(slot)->tag & END_CLASSES, new = ends_complete(ends, counts);
    link_blocks(index, number, NULL, hash, old & ~new, false);
    if (!link_blocks(index, number, NULL, hash, new & ~old, true)) {
        link_blocks(index, number, NULL, hash, old & new, false);
        counts = 0; /* better to know nothing of it */
    }
    entry_of(slot)->extra = counts;
    entry_of(slot)->tag = (entry_of(slot)->tag & ~END_CLASSES) | new;
    if (!counts) table_remove(&ends->entries, slot);
}

void ends_hold_block(Index *index, uint32_t number, const Pool *pool, uint64_t hash, uint64_t key) {
    Ends *ends = index->owners[number].ends;
    Slot slot = table_find(&ends->entries, hash);
    if (!slot.shard) return;
    uint32_t classes = entry_of(slot)->tag & END_CLASSES;
    if (link_block(index, number, key, classes, true)) return;
    link_blocks(index, number, pool, hash, classes, false);
    table_remove(&ends->entries, slot);
}

void ends_drop_block(Index *index, uint32_t number, uint64_t hash, uint64_t key) {
    Slot slot = table_find(&index->owners[number].ends->entries, hash);
    if (slot.shard)
        link_block(index, number, key, entry_of(slot)->tag & END_CLASSES, false);
}

/* Brings entries up to date with the classes, until the limit of work. */
static IndexResult link_some(Index *index, uint32_t number) {
    Ends *ends = index->owners[number].ends;
    for (; ends->shard < SHARDS; ends->shard++, ends->slot = 0) {
        Shard *shard = &ends->entries.shards[ends->shard];
        while (ends->slot < shard->capacity) {
            Slot slot = {shard, ends->slot};
            index->work++;
            if (index_is_over(index)) return INDEX_MORE;
            uint64_t counts = entry_at(shard, slot.at)->tag ? entry_at(shard, slot.at)->extra : 0;
            if (counts) set_counts(index, number, slot, counts);
            ends->slot++;
        }
    }
    ends->is_linking = false;
    return INDEX_OK;
}

IndexResult ends_note(Index *index, uint32_t number, int64_t group, uint32_t block_size,
                      uint32_t reach) {
    Owner *owner = &index->owners[number];
    if (group == NO_GROUP) return INDEX_OK; /* the only one, so that nothing is indexed */
    if (!owner->ends) {
        owner->ends = calloc(1, sizeof *owner->ends);
        if (!owner->ends) return INDEX_NO_MEMORY;
        table_init(&owner->ends->entries, mix64(index->secret + 7), true);
        index_note_cut(index, number);
    }
    ends_note_group(owner->ends, group, block_size, reach);
    return owner->ends->is_linking ? link_some(index, number) : INDEX_OK;
}

uint32_t ends_need(const Index *index, uint32_t number, int64_t group) {
    const Ends *ends = index->owners[number].ends;
    int known = ends ? ends_find_group(ends, group) : -1;
    if (known < 0) return UINT32_MAX;
    return (ends->groups[known].reach - 1) / ends->groups[known].block_size + 1;
}

static uint64_t stored_end(uint64_t end, bool may_repeat) {
    if (!(end & END_COPIES) || end & END_IN_DOUBT) return 1;
    uint64_t copies = (end & END_COPIES) == END_COPIES ? END_COPIES : (end & END_COPIES) + 1;
    return copies | (end & END_MAY_REPEAT) | (may_repeat ? END_MAY_REPEAT : 0);
}

/* What a removal leaves; kvstate/_core.pyi has the rules, which are those of blocks. */
static uint64_t removed_end(Owner *owner, uint64_t end, uint32_t left) {
    if (left != NOT_TOLD) return left < END_COPIES ? left : END_COPIES;
    if (end & END_IN_DOUBT) index_announce_copies(owner);
    if ((end & END_COPIES) <= 1) return 0;
    bool is_believed = owner->copies_announced && !(end & END_MAY_REPEAT);
    return (end - 1) | (is_believed || end & END_IN_DOUBT ? 0 : END_IN_DOUBT);
}

static uint64_t with_end(uint64_t counts, uint32_t shift, uint64_t end) {
    return (counts & ~(31ull << shift)) | end << shift;
}

IndexResult ends_store(Index *index, uint32_t number, int64_t group, uint64_t hash,
                       bool may_repeat) {
    Owner *owner = &index->owners[number];
    int known = owner->ends ? ends_find_group(owner->ends, group) : -1;
    if (known < 0) return INDEX_OK;
    uint32_t shift = (uint32_t)known * END_BITS;
    index->work += 4;
    Slot slot = table_find(&owner->ends->entries, hash);
    if (!slot.shard) {
        if (index_is_full(owner, 1)) return INDEX_OVER_LIMIT;
        slot = table_add(&owner->ends->entries, hash, END_PRESENT);
        if (!slot.shard) return INDEX_NO_MEMORY;
    }
    uint64_t counts = entry_of(slot)->extra;
    if (!(counts >> shift & END_COPIES))
        entry_of(slot)->tag = (entry_of(slot)->tag & (END_CLASSES | END_PRESENT)) |
                                    owner->ends->message << END_MESSAGE_SHIFT;
    uint64_t end = stored_end(counts >> shift & 31, may_repeat);
    set_counts(index, number, slot, with_end(counts, shift, end));
    return INDEX_OK;
}

IndexResult ends_put(Index *index, uint32_t number, uint64_t hash, uint64_t counts) {
    Owner *owner = &index->owners[number];
    Ends *ends = owner->ends;
    if (!ends || !counts || counts >> ends->group_count * END_BITS) return INDEX_DAMAGED;
    for (uint32_t group = 0; group < ends->group_count; group++) {
        uint64_t end = counts >> group * END_BITS & 31;
        if (end && !(end & END_COPIES)) return INDEX_DAMAGED;
    }
    if (index_is_full(owner, 1)) return INDEX_OVER_LIMIT;
    if (table_find(&ends->entries, hash).shard) return INDEX_DAMAGED;
    index->work += 4;
    Slot slot = table_add(&ends->entries, hash, END_PRESENT);
    if (!slot.shard) return INDEX_NO_MEMORY;
    set_counts(index, number, slot, counts);
    return INDEX_OK;
}

/* The classes that may have been complete before this message, one bit each. */
static uint32_t classes_before(Ends *ends, uint64_t hash) {
    Slot slot = table_find(&ends->entries, hash);
    if (!slot.shard || entry_of(slot)->tag >> END_MESSAGE_SHIFT == ends->message) return 0;
    uint64_t counts = entry_of(slot)->extra;
    for (uint32_t n = 0; n < ends->group_count; n++)
        counts &= ~((uint64_t)END_IN_DOUBT << n * END_BITS); /* it may have been there */
    return ends_complete(ends, counts);
}

static uint64_t divisor(uint64_t a, uint64_t b) { return b ? divisor(b, a % b) : a; }

/* Whether more of these blocks are held than a draft model makes the engine compute again, or all. */
static bool holds_more(Index *index, Owner *owner, const uint64_t *hashes, uint32_t count) {
    for (uint32_t at = 0; owner->last_drop && at <= owner->last_drop && at < count; at++) {
        uint32_t segment;
        uint64_t key;
        if (!index_find_key(index, owner, hashes[at], &segment, &key)) return false;
    }
    return true;
}

bool ends_may_reuse(Index *index, uint32_t number, const uint64_t *hashes, uint32_t count,
                    uint32_t block_size) {
    Owner *owner = &index->owners[number];
    Ends *ends = owner->ends;
    if (!ends) return holds_more(index, owner, hashes, count);
    if (ends->is_inexact) return true;
    uint64_t unit = block_size, runs[MAX_END_CLASSES] = {0};
    for (uint32_t n = 0; n < ends->class_count; n++)
        unit = unit / divisor(unit, ends->classes[n].block_size) * ends->classes[n].block_size;
    for (uint32_t at = 0; at < count; at++) {
        uint32_t segment, complete;
        uint64_t key, end = (uint64_t)(at + 1) * block_size;
        index->work += 2;
        if (!index_find_key(index, owner, hashes[at], &segment, &key)) return false;
        complete = classes_before(ends, hashes[at]);
        bool is_reached = end % unit == 0;
        for (uint32_t n = 0; n < ends->class_count; n++) {
            const EndClass *class = &ends->classes[n];
            uint64_t size = class->block_size, need = class->need * size;
            if (end % size == 0 || size < block_size)
                runs[n] = complete >> n & 1 ? runs[n] + 1 : 0;
            is_reached &= runs[n] * (size > block_size ? size : block_size) >=
                          (need < end ? need : end);
        }
        if (is_reached) return true;
    }
    return false;
}

void ends_remove(Index *index, uint32_t number, int64_t group, uint64_t hash, uint32_t left) {
    Owner *owner = &index->owners[number];
    int known = owner->ends ? ends_find_group(owner->ends, group) : -1;
    index->work += 2;
    Slot slot = known < 0 ? (Slot){0} : table_find(&owner->ends->entries, hash);
    if (!slot.shard) return;
    uint32_t shift = (uint32_t)known * END_BITS;
    uint64_t counts = entry_of(slot)->extra, end = counts >> shift & 31;
    if (end) set_counts(index, number, slot, with_end(counts, shift, removed_end(owner, end, left)));
}

IndexResult ends_clear_some(Index *index, uint32_t number) {
    Ends *ends = index->owners[number].ends;
    if (!ends) return INDEX_OK;
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &ends->entries.shards[n];
        for (uint32_t at = shard->capacity; at-- && shard->used;) {
            if (!(at % 1024)) index->work++;
            if (!entry_at(shard, at)->tag) continue;
            index->work += 4;
            set_counts(index, number, (Slot){shard, at}, 0);
            if (index_is_over(index)) return INDEX_MORE;
            at++; /* another entry may have moved up here */
        }
    }
    table_clear(&ends->entries);
    ends->is_linking = false;
    if (ends->is_forgotten) ends_free(index, number);
    return INDEX_OK;
}

void ends_forget_groups(Index *index, uint32_t number) {
    Ends *ends = index->owners[number].ends;
    if (!ends) return;
    ends->is_forgotten = true;
    if (!ends->entries.used) ends_free(index, number);
}

void ends_free(Index *index, uint32_t number) {
    Owner *owner = &index->owners[number];
    if (!owner->ends) return;
    table_clear(&owner->ends->entries);
    free(owner->ends);
    owner->ends = NULL;
    index_note_cut(index, number);
}
