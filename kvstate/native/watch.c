#include "index.h"

/* The bit of a key in `watched`, by which nearly all stores are known to be of no watched block. */
static uint64_t bit_of(uint64_t key) { return 1ull << (key & 63); }

static void gather(Owner *owner) {
    owner->watched = 0;
    for (uint32_t n = 0; n < MAX_WATCHES; n++)
        if (owner->watches[n].is_used) owner->watched |= bit_of(owner->watches[n].key);
}

IndexResult index_watch(Index *index, uint32_t number, uint32_t slot, const Prompt *prompt,
                        uint32_t block_size) {
    Owner *owner = &index->owners[number];
    size_t blocks = prompt->count ? (prompt->count - 1) / block_size : 0;
    if (!owner->watches) owner->watches = calloc(MAX_WATCHES, sizeof *owner->watches);
    if (!owner->watches || !index_widen(index, block_size)) return INDEX_NO_MEMORY;
    uint64_t key = index_root(index, owner->model, prompt->lora, block_size);
    for (size_t n = 0; n < blocks; n++)
        key = index_child(index, key, prompt->tokens + n * block_size, block_size,
                          n ? 0 : prompt->first);
    owner->watches[slot] = (Watch){.key = key, .is_used = blocks > 0};
    gather(owner);
    return INDEX_OK;
}

bool index_was_stored(const Index *index, uint32_t number, uint32_t slot) {
    const Owner *owner = &index->owners[number];
    return owner->watches && owner->watches[slot].was_stored;
}

void watch_stored(Owner *owner, uint64_t key) {
    if (!(owner->watched & bit_of(key))) return;
    for (uint32_t n = 0; n < MAX_WATCHES; n++)
        if (owner->watches[n].is_used && owner->watches[n].key == key)
            owner->watches[n].was_stored = true;
}
