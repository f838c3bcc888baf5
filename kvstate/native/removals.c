#include <math.h>

#include "index.h"

void removals_note(const Index *index, Owner *owner, uint64_t key) {
    uint32_t room = index->removal_room;
    if (!owner->removals) owner->removals = calloc(room, sizeof *owner->removals);
    if (!owner->removals) return;
    owner->removals[owner->removal_count++ % room] = (Removal){.key = key, .at = index->now};
}

double index_removed_at(Index *index, uint32_t number, const Prompt *prompt, size_t blocks) {
    const Owner *owner = &index->owners[number];
    uint32_t block_size = owner->block_size;
    if (!owner->removals || !block_size || prompt->count / block_size <= blocks) return NAN;
    if (!index_widen(index, block_size)) return NAN;
    uint64_t key = index_root(index, owner->model, prompt->lora, block_size);
    for (size_t n = 0; n <= blocks; n++)
        key = index_child(index, key, prompt->tokens + n * block_size, block_size,
                          n ? 0 : prompt->first);
    uint32_t room = index->removal_room;
    uint64_t known = owner->removal_count < room ? owner->removal_count : room;
    for (uint64_t back = 1; back <= known; back++) {
        const Removal *one = &owner->removals[(owner->removal_count - back) % room];
        if (one->key == key) return one->at;
    }
    return NAN;
}
