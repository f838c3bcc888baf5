/* Rows: which holders have a block key, and how many of a holder's hashes have it. */
#ifndef KVSTEER_ROWS_H
#define KVSTEER_ROWS_H

#include "index.h"

static inline uint64_t sharer_key(const Index *index, Holder holder, uint64_t key) {
    return mix64(key ^ mix64(holder + index->secret));
}

/* Adds a hash of this holder for this key; returns false if out of memory. */
static inline bool row_hold(Index *index, Holder holder, uint64_t key) {
    Gap gap;
    Slot row = table_seek(&index->rows, key, &gap);
    SetId from = row.shard ? entry_of(row)->tag : EMPTY_SET;
    SetId to = sets_remembered(&index->sets, from, holder, true);
    if (to == NO_SET && sets_contain(&index->sets, from, holder)) {
        uint64_t sharer = sharer_key(index, holder, key);
        Slot slot = table_find(&index->sharers, sharer);
        if (slot.shard) {
            entry_of(slot)->tag++;
            return true;
        }
        return table_add(&index->sharers, sharer, 2).shard != NULL;
    }
    if (to == NO_SET) to = sets_step(&index->sets, from, holder, true);
    if (to == NO_SET) return false;
    if (row.shard) {
        entry_of(row)->tag = to;
    } else if (!table_fill(&index->rows, key, to, gap).shard) {
        sets_drop_unused(&index->sets, to);
        return false;
    }
    index->sets.sets[to].rows++;
    if (from) {
        index->sets.sets[from].rows--;
        sets_drop_unused(&index->sets, from);
    }
    return true;
}

/* Drops a whole row because there is no memory to change it: its other holders get no credit for it
 * any more, which costs hits but claims nothing false. When they release it, they find nothing. */
static inline void row_drop(Index *index, Slot row) {
    SetId set = entry_of(row)->tag;
    table_remove(&index->rows, row);
    index->sets.sets[set].rows--;
    sets_drop_unused(&index->sets, set);
}

/* Removes a hash of this holder for this key. */
static inline void row_release(Index *index, Holder holder, uint64_t key) {
    if (index->sharers.used) {
        Slot slot = table_find(&index->sharers, sharer_key(index, holder, key));
        if (slot.shard) {
            if (--entry_of(slot)->tag == 1) table_remove(&index->sharers, slot);
            return;
        }
    }
    Slot row = table_find(&index->rows, key);
    SetId from = row.shard ? entry_of(row)->tag : EMPTY_SET;
    if (!sets_contain(&index->sets, from, holder)) return; /* its row was dropped */
    SetId to = sets_step(&index->sets, from, holder, false);
    if (to == NO_SET) {
        row_drop(index, row);
        return;
    }
    if (to) {
        entry_of(row)->tag = to;
        index->sets.sets[to].rows++;
    } else {
        table_remove(&index->rows, row);
    }
    index->sets.sets[from].rows--;
    sets_drop_unused(&index->sets, from);
}

#endif
