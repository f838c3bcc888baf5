#include "index.h"

/* The most steps in which a prefix to reuse is looked for; honest engines need a few. */
#define STEPS_FOR_BLOCK 16u
#define FREE_STEPS 1024u

/* Blocks whose rows are fetched together, so that their cache misses overlap. */
#define CHUNK 64

/* The walk along one prompt, for one block size. */
typedef struct {
    Index *index;
    LookupSpace *space;
    uint32_t block_size;
    uint32_t holders, active;
    uint8_t counted; /* which blocks count, as in `bits` of the space */
    bool started;
    bool is_cut;     /* whether an overlap may have to be cut, so that runs are noted */
    bool no_memory;  /* for the runs */
    SetId set;       /* of the present run */
    uint32_t length; /* of this run, in blocks */
    uint32_t runs;   /* how many are noted */
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
    free(space->runs);
}

/* Notes which owners hold the run. */
static void note_holders(Walk *walk) {
    LookupSpace *space = walk->space;
    const Set *set = &walk->index->sets.sets[walk->set];
    space->run++;
    for (uint32_t n = 0; n < set->length; n++) {
        Holder holder = set->members[n];
        if (holder & FIRST_END) continue; /* a class of other groups */
        uint32_t number = holder / HOLDERS, segment = holder / TIERS & 1;
        const Owner *owner = &walk->index->owners[number];
        bool certain = owner->trusted && segment == owner->certain &&
                       !(owner->doubted >> holder % TIERS & 1);
        uint8_t bit = (uint8_t)(1u << (holder % TIERS + (certain ? 0 : TIERS)));
        if (!(bit & walk->counted)) continue;
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

/* Keeps the run, for overlaps that may have to be cut. */
static void note_run(Walk *walk) {
    LookupSpace *space = walk->space;
    if (walk->runs == space->run_room) {
        uint32_t room = 2 * space->run_room + 64;
        walk->no_memory |= !resize((void **)&space->runs, room, sizeof *space->runs);
        if (walk->no_memory) return;
        space->run_room = room;
    }
    uint32_t begin = walk->runs ? space->runs[walk->runs - 1].end : 0;
    space->runs[walk->runs++] = (Run){walk->set, begin, begin + walk->length, 0};
}

/* Counts the run for the owners that hold it; the overlaps of the others end before it. */
static void count_run(Walk *walk) {
    LookupSpace *space = walk->space;
    if (walk->is_cut) note_run(walk);
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
    return row.shard ? entry_of(row)->tag : EMPTY_SET;
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

/* An owner's holders in a set, one bit each. */
static uint32_t holders_in(const Sets *sets, SetId id, uint32_t number) {
    const Set *set = &sets->sets[id];
    uint32_t bits = 0;
    for (uint32_t at = sets_position(set, number * HOLDERS);
         at < set->length && set->members[at] / HOLDERS == number; at++)
        bits |= 1u << set->members[at] % HOLDERS;
    return bits;
}

/* Returns `end` if the class has its run before this block; if not, the first block of those before
 * which it cannot have it either. Of a run that begins before the prompt, it needs what is there.
 * run: one that begins before `end`. */
static uint32_t reach_back(const Walk *walk, const EndClass *class, uint32_t bit, uint32_t end,
                           const Run *run, uint32_t *steps) {
    uint32_t size = walk->block_size, step = class->block_size / size, at = end;
    uint64_t tokens = (uint64_t)class->need * class->block_size, blocks = (tokens - 1) / size + 1;
    uint32_t begin = blocks < end ? end - (uint32_t)blocks : 0;
    if (!step) step = 1;
    for (; at > begin; ++*steps) {
        while (run->begin >= at) run--, ++*steps;
        if (!(run->bits >> bit & 1)) return run->begin;
        uint32_t inside = (at - run->begin - 1) / step * step + step;
        at = inside < at ? at - inside : 0;
    }
    return end;
}

static uint32_t divisor(uint32_t a, uint32_t b) { return b ? divisor(b, a % b) : a; }

/* The least common multiple of the block sizes, in blocks; 0 if ends cannot be told from them. */
static uint32_t alignment(const Ends *ends, uint32_t block_size) {
    uint64_t blocks = 1;
    for (uint32_t n = 0; n < ends->class_count; n++) {
        uint32_t size = ends->classes[n].block_size, step = size / block_size;
        if (size % block_size && block_size % size) return 0;
        if (step) blocks = blocks / divisor((uint32_t)blocks, step) * step;
        if (blocks > MAX_BLOCK_SIZE) return 0;
    }
    return (uint32_t)blocks;
}

/* The longest prefix of at most `limit` blocks that the engine can reuse. A walk that takes too
 * many steps gives up, and finds nothing. */
static uint32_t reusable(const Walk *walk, const Ends *ends, uint32_t limit) {
    uint32_t unit = alignment(ends, walk->block_size), end = limit, steps = 0;
    const Run *run = &walk->space->runs[walk->runs - 1];
    for (end -= end % unit; end && steps <= STEPS_FOR_BLOCK * limit + FREE_STEPS;) {
        uint32_t found = end;
        while (run->begin >= end) run--;
        for (uint32_t n = 0; n < ends->class_count && found == end; n++)
            found = reach_back(walk, &ends->classes[n], FIRST_END + n, end, run, &steps);
        if (found == end) return end;
        end = found - found % unit;
    }
    return 0;
}

/* Whether the ends show where a prefix can be reused. */
static bool are_enough(const Ends *ends, uint32_t block_size) {
    return !ends->is_inexact && alignment(ends, block_size);
}

/* Whether they show it exactly: blocks of a group that end within another block have no entry. */
static bool are_exact(const Ends *ends, uint32_t block_size) {
    bool is_exact = are_enough(ends, block_size) && !ends->is_linking;
    for (uint32_t n = 0; n < ends->class_count; n++)
        is_exact &= ends->classes[n].block_size % block_size == 0;
    return is_exact;
}

/* Counts the first blocks of an owner's overlap again, by its runs. */
static Overlap count_again(const Walk *walk, uint32_t number, uint32_t blocks, bool is_certain) {
    const Owner *owner = &walk->index->owners[number];
    Overlap overlap = walk->space->overlaps[number];
    memset(overlap.tiers, 0, sizeof overlap.tiers);
    overlap.uncertain = 0;
    for (const Run *run = walk->space->runs; blocks; run++) {
        uint32_t length = run->end - run->begin < blocks ? run->end - run->begin : blocks;
        uint32_t certain = run->bits >> owner->certain * TIERS & 0xf & ~owner->doubted;
        if (certain && owner->trusted && is_certain && !overlap.uncertain)
            overlap.tiers[__builtin_ctz(certain)] += length;
        else
            overlap.uncertain += length;
        blocks -= length;
    }
    return overlap;
}

/* Cuts an owner's overlap to what the engine can reuse of it. Where ends may be missing, because
 * blocks are uncertain or lie on other tiers, the blocks after them are uncertain. */
static void cut(Walk *walk, uint32_t number) {
    const Owner *owner = &walk->index->owners[number];
    Overlap *overlap = &walk->space->overlaps[number];
    uint32_t held = overlap->uncertain, known = 0, device = 1u << owner->certain * TIERS;
    for (int tier = 0; tier < TIERS; tier++) held += overlap->tiers[tier];
    for (uint32_t n = 0; n < walk->runs; n++)
        walk->space->runs[n].bits = holders_in(&walk->index->sets, walk->space->runs[n].set, number);
    for (uint32_t n = 0; n < walk->runs && walk->space->runs[n].bits & device; n++)
        known = walk->space->runs[n].end;
    if (owner->doubted & 1) known = 0;
    uint32_t limit = held > owner->last_drop ? held - owner->last_drop : 0, whole = limit;
    bool is_exact = true;
    if (owner->ends) {
        is_exact = are_exact(owner->ends, walk->block_size);
        if (are_enough(owner->ends, walk->block_size))
            whole = reusable(walk, owner->ends, known < limit ? known : limit);
    }
    *overlap = count_again(walk, number, whole, is_exact);
    if (owner->ends && known < limit && whole < limit) {
        overlap->uncertain += limit - whole;
        whole = limit;
    }
    overlap->unusable = held - whole;
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

static int64_t overlaps_of(Index *index, LookupSpace *space, const Prompt *prompt,
                           uint8_t counted) {
    const Model *model = &index->models[prompt->model];
    int64_t count = 0;
    if (!prompt->count) return 0;
    if (!fit(space, index)) return -1;
    for (uint32_t size = 0; size < model->size_count; size++) {
        if (!model->sizes[size].blocks) continue;
        Walk walk = {.index = index, .space = space, .block_size = model->sizes[size].block_size,
                     .counted = counted, .is_cut = model->cut_owners > 0};
        walk_prompt(&walk, prompt, (prompt->count - 1) / walk.block_size);
        if (walk.no_memory) return -1;
        for (uint32_t n = 0; n < walk.holders; n++) {
            if (index->owners[space->holders[n]].is_cut) cut(&walk, space->holders[n]);
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

int64_t index_overlaps(Index *index, LookupSpace *space, const Prompt *prompt) {
    return overlaps_of(index, space, prompt, UINT8_MAX);
}

int64_t index_overlaps_on(Index *index, LookupSpace *space, const Prompt *prompt, uint32_t tier) {
    if (index->models[prompt->model].cut_owners) return 0;
    return overlaps_of(index, space, prompt, (uint8_t)(1u << tier));
}
