#include "index.h"

/* Blocks whose rows are fetched together, so that their cache misses overlap. */
#define CHUNK 64

/* The walk along one prompt, for one block size. */
typedef struct {
    Index *index;
    LookupSpace *space;
    uint32_t block_size;
    uint32_t holders, active;
    bool started;
    SetId set;       /* of the present run */
    uint32_t length; /* of this run, in blocks */
} Walk;

static bool resize(void **array, size_t count, size_t size) {
    void *grown = realloc(*array, count * size);
    if (!grown) return false;
    *array = grown;
    return true;
}

static bool fit(LookupSpace *space, const Index *index) {
    size_t owners = index->owner_count, workers = 0;
    for (size_t n = 0; n < owners; n++)
        if (index->owners[n].worker >= workers) workers = index->owners[n].worker + 1;
    if (owners > space->owners) {
        if (!resize((void **)&space->holders, owners, sizeof *space->holders) ||
            !resize((void **)&space->active, owners, sizeof *space->active) ||
            !resize((void **)&space->seen, owners, sizeof *space->seen) ||
            !resize((void **)&space->bits, owners, sizeof *space->bits) ||
            !resize((void **)&space->overlaps, owners, sizeof *space->overlaps) ||
            !resize((void **)&space->answer, owners, sizeof *space->answer))
            return false;
        memset(space->seen, 0, owners * sizeof *space->seen);
        space->run = 0;
        space->owners = (uint32_t)owners;
    }
    if (workers > space->workers) {
        if (!resize((void **)&space->place, workers, sizeof *space->place)) return false;
        space->workers = (uint32_t)workers;
    }
    if (space->place) memset(space->place, 0, space->workers * sizeof *space->place);
    return true;
}

void lookup_free(LookupSpace *space) {
    free(space->holders);
    free(space->active);
    free(space->seen);
    free(space->bits);
    free(space->overlaps);
    free(space->place);
    free(space->answer);
}

/* Notes which owners hold the run. */
static void note_holders(Walk *walk) {
    LookupSpace *space = walk->space;
    const Set *set = &walk->index->sets.sets[walk->set];
    space->run++;
    for (uint32_t n = 0; n < set->length; n++) {
        Holder holder = set->members[n];
        uint32_t number = holder / 8, segment = holder / TIERS & 1;
        const Owner *owner = &walk->index->owners[number];
        bool certain = owner->trusted && segment == owner->certain &&
                       !(owner->doubted >> holder % TIERS & 1);
        uint8_t bit = (uint8_t)(1u << (holder % TIERS + (certain ? 0 : TIERS)));
        if (space->seen[number] == space->run) {
            space->bits[number] |= bit;
            continue;
        }
        space->seen[number] = space->run;
        space->bits[number] = bit;
        if (!walk->started) {
            space->holders[walk->holders++] = number;
            space->active[walk->active++] = number;
            space->overlaps[number] = (Overlap){
                .worker = owner->worker, .block_size = walk->block_size, .rank = owner->rank};
        }
    }
    walk->started = true;
}

/* Counts the run for the owners that hold it; the overlaps of the others end before it. */
static void count_run(Walk *walk) {
    LookupSpace *space = walk->space;
    note_holders(walk);
    uint32_t kept = 0;
    for (uint32_t n = 0; n < walk->active; n++) {
        uint32_t number = space->active[n];
        if (space->seen[number] != space->run) continue;
        Overlap *overlap = &space->overlaps[number];
        uint8_t certain = space->bits[number] & 0xf;
        if (certain && !overlap->uncertain)
            overlap->tiers[__builtin_ctz(certain)] += walk->length;
        else
            overlap->uncertain += walk->length;
        space->active[kept++] = number;
    }
    walk->active = kept;
}

/* Adds the next block, with its set; returns false if no owner holds all blocks up to it. */
static bool step(Walk *walk, SetId set) {
    if (set == walk->set && set) {
        walk->length++;
        return true;
    }
    if (walk->length) count_run(walk);
    walk->set = set;
    walk->length = set ? 1 : 0;
    return set && (!walk->started || walk->active);
}

static SetId row_of(Index *index, uint64_t key) {
    Slot row = table_find(&index->rows, key);
    return row.shard ? row.shard->tags[row.at] : EMPTY_SET;
}

static void walk_prompt(Walk *walk, const Prompt *prompt, size_t blocks) {
    Index *index = walk->index;
    uint64_t key = index_root(index, prompt->model, prompt->lora, walk->block_size);
    uint64_t keys[CHUNK];
    /* the first block alone: most unsuccessful lookups end there */
    for (size_t start = 0, chunk = 1; start < blocks; start += chunk, chunk = CHUNK) {
        if (chunk > blocks - start) chunk = blocks - start;
        for (size_t n = 0; n < chunk; n++) {
            const uint32_t *tokens = prompt->tokens + (start + n) * walk->block_size;
            uint64_t extra = start + n ? 0 : prompt->first;
            keys[n] = key = index_child(index, key, tokens, walk->block_size, extra);
            table_prefetch(&index->rows, key);
        }
        for (size_t n = 0; n < chunk; n++)
            if (!step(walk, row_of(index, keys[n]))) return;
    }
    if (walk->length) count_run(walk);
}

static uint64_t certain_tokens(const Overlap *overlap) {
    uint64_t blocks = 0;
    for (int tier = 0; tier < TIERS; tier++) blocks += overlap->tiers[tier];
    return blocks * overlap->block_size;
}

/* More certain tokens are better, then more uncertain ones, then more on the device. */
static bool better(const Overlap *a, const Overlap *b) {
    uint64_t certain_a = certain_tokens(a), certain_b = certain_tokens(b);
    if (certain_a != certain_b) return certain_a > certain_b;
    uint64_t uncertain_a = (uint64_t)a->uncertain * a->block_size;
    uint64_t uncertain_b = (uint64_t)b->uncertain * b->block_size;
    if (uncertain_a != uncertain_b) return uncertain_a > uncertain_b;
    return (uint64_t)a->tiers[0] * a->block_size > (uint64_t)b->tiers[0] * b->block_size;
}

int64_t index_overlaps(Index *index, LookupSpace *space, const Prompt *prompt) {
    const Model *model = &index->models[prompt->model];
    int64_t count = 0;
    if (!prompt->count) return 0;
    if (!fit(space, index)) return -1;
    for (uint32_t size = 0; size < model->size_count; size++) {
        if (!model->sizes[size].blocks) continue;
        Walk walk = {.index = index, .space = space, .block_size = model->sizes[size].block_size};
        walk_prompt(&walk, prompt, (prompt->count - 1) / walk.block_size);
        for (uint32_t n = 0; n < walk.holders; n++) {
            const Overlap *overlap = &space->overlaps[space->holders[n]];
            uint32_t *place = &space->place[overlap->worker];
            if (!*place) {
                *place = (uint32_t)++count;
                space->answer[*place - 1] = *overlap;
            } else if (better(overlap, &space->answer[*place - 1])) {
                space->answer[*place - 1] = *overlap;
            }
        }
    }
    return count;
}
