/* The block index: which ranks hold the leading blocks of a prompt.
 *
 * A rank ("owner") has blocks in pools (medium, group, block size), each with two maps from engine
 * hash to block key and count of copies: one for each segment, certain and uncertain. A row of the
 * index maps a block key to the set of its holders; a holder is (owner, segment, tier), or (owner,
 * class of other groups) where those groups hold what a prefix that ends there needs (ends.h).
 *
 * Invariants, which index_check() verifies:
 *  1. a holder is in the set of a key's row if and only if some hash of that owner, in that segment
 *     and a pool of that tier, has that key; a row with no holder does not exist;
 *  2. `sharers` counts the hashes behind one (holder, key) wherever there are two or more;
 *  3. each set counts its rows;
 *  4. each model counts its blocks and pools of each block size, and has none without a pool; each
 *     owner counts its blocks;
 *  5. after a removal or an age, no pool is empty;
 *  6. the holder (owner, class of other groups) is in the set of a key's row if and only if some hash
 *     with that key has a certain block of that owner on the device, and the class is complete in
 *     the entry of that hash (ends.h); `sharers` counts such hashes as well.
 * Input from outside is checked before it gets here; the invariants still hold after a function
 * returned INDEX_NO_MEMORY.
 */
#ifndef KVSTEER_INDEX_H
#define KVSTEER_INDEX_H

#include "ends.h"
#include "groups.h"
#include "sets.h"

#define TIERS 4
#define MAX_POOLS 64
#define MAX_COPIES 0x7ffffu
/* Above the copies in a tag: whether some may be none, because an engine may have announced a block
 * again that it held; above that the mark of blocks that a removal made uncertain, or 0. */
#define MAY_BE_FEWER 0x80000u
#define MARK_SHIFT 20
#define MAX_MARK 0xfffu
#define NOT_TOLD UINT32_MAX /* how many copies a removal leaves */
#define MAX_BLOCK_SIZE 65536u

#define SEGMENTS 2 /* certain, and uncertain */

/* Media for which all known sources announce removals, one bit each, in the order of
 * kvstate/overlap.py: GPU, DEVICE, CPU_PINNED (engines' own caches, SGLang's HiCache). Any other
 * medium is doubted, because vLLM's MooncakeStoreConnector and LMCache announce stores on "cpu" and
 * "CPU" but never removals, until a removal from it arrives or, on the host tier, a block is copied
 * there by its hash alone: only vLLM's OffloadingConnector and TensorRT-LLM do this, and both
 * announce removals. Blocks on a doubted medium are never certain, and are forgotten when they get
 * old. docs/internals/feeds.md has the sources. */
#define REMOVING_MEDIA 0x0bu
#define HOST_TIER 1u

typedef enum {
    INDEX_OK,
    INDEX_UNKNOWN_PARENT,
    INDEX_OVER_LIMIT,
    INDEX_NO_MEMORY,
    INDEX_MORE,
    INDEX_DAMAGED, /* only of what was saved */
} IndexResult;

typedef struct {
    uint32_t medium; /* a small number per name, see wire.c */
    int64_t group;   /* or NO_GROUP */
    uint32_t block_size;
    uint32_t tier;
    /* hash -> copies, MAY_BE_FEWER and mark (tag), block key (extra); by physical segment. On an
     * aging medium the tag is the age in which the block was last stored. */
    Table blocks[SEGMENTS];
} Pool;

typedef struct {
    uint32_t block_size;
    uint32_t pools;
    size_t blocks;
} SizeInUse;

typedef struct {
    uint64_t seed;
    SizeInUse *sizes;
    uint32_t size_count;
    uint32_t cut_owners; /* whose overlaps may have to be cut, see lookup.c */
} Model;

/* Blocks whose store is awaited, at most so many of an owner. */
#define MAX_WATCHES 32u

typedef struct {
    uint64_t key;
    bool is_used, was_stored;
} Watch;

#define MAX_REMOVALS (1u << 24)

/* A block that was removed. at: the last time that was told then, in seconds. */
typedef struct {
    uint64_t key;
    double at;
} Removal;

typedef struct {
    bool present, trusted;
    uint32_t worker; /* ranks of one worker share it */
    uint32_t rank;
    uint32_t model;
    uint32_t certain; /* the physical segment that is certain now */
    uint32_t block_size; /* of the last store */
    Pool **pools; /* in order: by medium, group and block size */
    uint32_t pool_count;
    size_t blocks, limit_blocks; /* how many it holds, and its limit */
    Groups groups;
    Ends *ends;         /* of other attention groups; NULL if there are none */
    uint32_t last_drop; /* matched blocks at the end that the engine computes again */
    bool is_cut;        /* whether its model counts it among the cut owners */
    int8_t names_salts, names_loras; /* whether stores could name them: -1 unknown, 0 no, 1 yes */
    uint32_t removing; /* media whose removals are announced, one bit each */
    uint32_t aging;    /* media that were doubted when their first block arrived */
    uint32_t aging_on[TIERS]; /* the same by tier */
    uint32_t doubted;  /* tiers that have a doubted medium, one bit each */
    uint32_t age;      /* from 1 on */
    bool copies_announced; /* the removal of each copy is announced, not only of the last */
    uint32_t mark; /* of removals since the last hole, another after each; 0 when all are used */
    uint32_t restoring; /* how many more ages to look for marked blocks, which are certain again */
    uint32_t swept, swept_slot; /* how far index_expire() got in this age */
    void *pending; /* a message applied in part, see module.c */
    uint64_t removed_unknown, restored_with_other_tokens, over_limit, copied_unknown;
    uint64_t removed_certain; /* blocks that were removed while they were certain */
    Watch *watches;   /* MAX_WATCHES, or NULL before the first */
    uint64_t watched; /* a bit for the last six bits of each watched key */
    Removal *removals; /* the last ones, in a ring; NULL before the first that is remembered */
    uint64_t removal_count;
} Owner;

typedef struct {
    uint32_t medium, tier, block_size;
    int64_t group;
} PoolName;

/* A chain of blocks whose keys are known. */
typedef struct {
    PoolName pool;
    uint32_t count;
    bool is_uncertain; /* its parent is, and so are they */
    bool may_repeat;   /* as in Stored */
} Keyed;

typedef struct {
    Table rows;    /* block key -> set of holders (tag) */
    Table sharers; /* (holder, key) -> hashes (tag), from two on */
    Sets sets;
    Owner *owners;
    uint32_t owner_count;
    Model *models;
    uint32_t model_count;
    uint64_t secret;
    uint64_t *lanes; /* random multipliers, one for each token of a block */
    uint32_t lane_count;
    uint64_t *keys; /* of the last chain that was stored, and which that was */
    uint32_t key_room;
    Keyed keyed;
    size_t limit_blocks; /* of an owner without a limit of its own */
    uint32_t removal_room; /* how many removals of each owner are remembered */
    double now;            /* the last time that was told, in seconds */
    uint64_t work, work_limit; /* table lookups or equivalent; resumable work stops at it */
} Index;

/* A chain of blocks to store; extras is NULL, or a hash for each block, 0 if only tokens count. */
typedef struct {
    PoolName pool;
    const uint64_t *hashes;
    uint32_t count;
    uint32_t following; /* blocks of the same event that are stored afterwards */
    bool may_repeat;    /* blocks that are held may be announced again, without a new copy */
    bool has_parent;
    uint64_t parent;
    const uint32_t *tokens;
    uint64_t lora; /* hash of the adapter, 0 for none */
    const uint64_t *extras;
} Stored;

/* The overlap of one worker: the best of its ranks. */
typedef struct {
    uint32_t worker, block_size;
    uint32_t tiers[TIERS];
    uint32_t uncertain;
    uint32_t rank;
    uint32_t unusable; /* held after those, but the engine cannot reuse them */
} Overlap;

bool index_init(Index *index, uint64_t secret, size_t limit_blocks);
void index_free(Index *index);
size_t index_bytes(const Index *index);
/* Returns the number of a new model or owner; UINT32_MAX if out of memory. */
uint32_t index_add_model(Index *index, uint64_t seed);
uint32_t index_add_owner(Index *index, uint32_t worker, uint32_t model, uint32_t rank);
void index_remove_owner(Index *index, uint32_t owner);
void index_clear(Index *index, uint32_t owner);
/* Continues until the limit of work; returns INDEX_MORE if something is left. */
IndexResult index_clear_some(Index *index, uint32_t owner);
IndexResult index_demote_some(Index *index, uint32_t owner);
IndexResult index_store(Index *index, uint32_t owner, const Stored *stored);
/* Stores a chain as index_store() has done it in another process, with its secret. hashes, keys: as
 * bytes, since they may be in the midst of a record. */
IndexResult index_store_keyed(Index *index, uint32_t owner, const Keyed *chain,
                              const unsigned char *hashes, const unsigned char *keys);
/* Have what is needed on its way from memory, since most of a large index is in no cache: the places
 * of blocks in the pools of this medium and group, the rows of keys, and those of blocks held. */
void index_fetch(Index *index, uint32_t owner, const PoolName *pool, const unsigned char *hashes,
                 uint32_t count);
void index_fetch_rows(Index *index, const unsigned char *keys, uint32_t count);
void index_fetch_rows_held(Index *index, uint32_t owner, const PoolName *pool,
                           const unsigned char *hashes, uint32_t count);
/* Adds a copy, in the pool of this medium and group, of each block held under its hash. */
IndexResult index_copy(Index *index, uint32_t owner, const PoolName *pool, const uint64_t *hashes,
                       uint32_t count);
/* Adds a copy, in the pool of this medium and group, of each block that another owner of the same
 * model holds under its hash. */
IndexResult index_lend(Index *index, uint32_t owner, uint32_t lender, const PoolName *pool,
                       const uint64_t *hashes, uint32_t count, uint32_t *lent);
/* Drops a copy; kvstate/_core.pyi has the rules. left: copies left then, or NOT_TOLD. */
bool index_remove(Index *index, uint32_t owner, uint32_t medium, int64_t group, uint64_t hash,
                  uint32_t left);
/* Checks up to this many more slots of doubted media, and forgets blocks last stored before this
 * age; returns true once all are checked: the next age has begun. */
bool index_expire(Index *index, uint32_t owner, size_t slots);
/* Finds a block under this hash, a certain one first; NULL if it is not held. `segment` is where
 * its children belong. */
const Pool *index_find_key(Index *index, Owner *owner, uint64_t hash, uint32_t *segment,
                           uint64_t *key);
/* Notes that the removal of each copy is announced. */
void index_announce_copies(Owner *owner);
/* Forgets what was learned of an owner's media and copies: it may be another engine. */
void index_forget_media(Index *index, uint32_t owner);
/* Adds a block as it was saved, which the owner must not have yet; see persist.h. */
IndexResult index_put(Index *index, uint32_t owner, const PoolName *pool, uint32_t uncertain,
                      uint64_t hash, uint64_t key, uint32_t tag);
size_t index_count_tier(const Index *index, uint32_t owner, uint32_t tier, bool uncertain);
uint64_t index_hash_bytes(Index *index, const unsigned char *bytes, size_t length);
/* Returns the violated invariant, or NULL; slow. */
const char *index_check(Index *index);

/* ends.c */

/* Notes a group by a store of it, and how many tokens before its end a prefix needs (NO_REACH: not
 * known); returns INDEX_MORE if it has to be called again with the same. */
IndexResult ends_note(Index *index, uint32_t owner, int64_t group, uint32_t block_size,
                      uint32_t reach);
/* How many blocks of a group a prefix needs before its end; UINT32_MAX for unknown groups. */
uint32_t ends_need(const Index *index, uint32_t owner, int64_t group);
/* Adds a copy of an end, or drops one, as for blocks. */
IndexResult ends_store(Index *index, uint32_t owner, int64_t group, uint64_t hash, bool may_repeat);
void ends_remove(Index *index, uint32_t owner, int64_t group, uint64_t hash, uint32_t left);
/* Adds an entry as it was saved, which the owner must not have yet; see persist.h. */
IndexResult ends_put(Index *index, uint32_t owner, uint64_t hash, uint64_t counts);
/* Whether the engine may have been able to reuse a part of a prompt that begins with these blocks,
 * before this message: true if that is not known. */
bool ends_may_reuse(Index *index, uint32_t owner, const uint64_t *hashes, uint32_t count,
                    uint32_t block_size);
/* Notes that a certain block on the device is held from now on, or will be dropped. */
void ends_hold_block(Index *index, uint32_t owner, const Pool *pool, uint64_t hash, uint64_t key);
void ends_drop_block(Index *index, uint32_t owner, uint64_t hash, uint64_t key);
/* Forgets all ends, until the limit of work. */
IndexResult ends_clear_some(Index *index, uint32_t owner);
/* Forgets the groups as soon as no end is left. */
void ends_forget_groups(Index *index, uint32_t owner);
/* Frees all; no row must have a holder of a class. */
void ends_free(Index *index, uint32_t owner);

/* lookup.c */

/* A run of blocks that have the same holders. */
typedef struct {
    SetId set;
    uint32_t begin, end; /* in blocks of the prompt */
    uint32_t bits;       /* of one owner, by the low bits of its holders */
} Run;

/* Memory that lookups reuse; all zero at first. */
typedef struct {
    uint32_t *holders; /* owners that hold the first block */
    uint32_t *active;  /* those that hold every block so far */
    uint64_t *seen;    /* by owner: the last run that it holds */
    uint8_t *bits;     /* by owner: how it holds that run; bit t: certain on tier t, 4 + t: not */
    Overlap *overlaps; /* by owner */
    uint32_t *place;   /* by worker: 1 + index of its overlap in `answer`, or 0 */
    Overlap *answer;
    Run *runs; /* of the prompt, where an overlap may have to be cut */
    uint64_t run;
    uint32_t owners, workers, run_room;
} LookupSpace;

typedef struct {
    uint32_t model;
    uint64_t lora;  /* hash of the adapter, 0 for none */
    uint64_t first; /* hash of the first block's extra keys, 0 for none */
    const uint32_t *tokens;
    size_t count;
} Prompt;

/* Writes the best overlap of each worker that holds the first block to space->answer; returns how
 * many, or -1 if out of memory. At most (count - 1) / block size blocks are looked up. */
int64_t index_overlaps(Index *index, LookupSpace *space, const Prompt *prompt);
/* The same of certain blocks on one tier alone; nothing for models whose overlaps may be cut. */
int64_t index_overlaps_on(Index *index, LookupSpace *space, const Prompt *prompt, uint32_t tier);
void lookup_free(LookupSpace *space);

/* watch.c */

/* Watches, in this slot, whether an owner stores the last block that can be reused of a prompt, in
 * blocks of this size; what the slot watched before is forgotten. A prompt without such a block is
 * not watched. */
IndexResult index_watch(Index *index, uint32_t owner, uint32_t slot, const Prompt *prompt,
                        uint32_t block_size);
/* Whether the block that is watched in this slot was stored since, whatever became of it. */
bool index_was_stored(const Index *index, uint32_t owner, uint32_t slot);
/* Notes that a block with this key was stored. */
void watch_stored(Owner *owner, uint64_t key);

/* removals.c */

/* Notes that a block with this key was removed; without memory, it is not remembered. */
void removals_note(const Index *index, Owner *owner, uint64_t key);
/* Returns when an owner last removed the block of a prompt behind so many of its blocks; NAN if that
 * is not remembered. */
double index_removed_at(Index *index, uint32_t owner, const Prompt *prompt, size_t blocks);

/* An owner's holders: one for each segment and tier, then one for each class of other groups. */
#define HOLDERS 16u
#define FIRST_END (SEGMENTS * TIERS)

static inline Holder index_holder(uint32_t owner, uint32_t segment, uint32_t tier) {
    return owner * HOLDERS + segment * TIERS + tier;
}

static inline Holder index_end_holder(uint32_t owner, uint32_t class) {
    return owner * HOLDERS + FIRST_END + class;
}

/* Counts an owner among those whose overlaps may have to be cut, if it is one. */
static inline void index_note_cut(Index *index, uint32_t number) {
    Owner *owner = &index->owners[number];
    bool is_cut = owner->present && (owner->ends || owner->last_drop);
    if (is_cut != owner->is_cut) index->models[owner->model].cut_owners += is_cut ? 1 : -1u;
    owner->is_cut = is_cut;
}

/* Whether this many more blocks or ends are too many. */
static inline bool index_is_full(const Owner *owner, size_t more) {
    size_t ends = owner->ends ? owner->ends->entries.used : 0;
    return owner->blocks + ends + more > owner->limit_blocks;
}

static inline uint64_t index_child(const Index *index, uint64_t parent, const uint32_t *tokens,
                                   uint32_t block_size, uint64_t extra) {
    uint64_t sum = 0;
    for (uint32_t n = 0; n < block_size; n++) sum += index->lanes[n] * (uint64_t)(tokens[n] + 1ull);
    uint64_t key = mix64(parent * 0x9e3779b97f4a7c15u + sum);
    return extra ? mix64(key ^ extra) : key;
}

static inline uint64_t index_root(const Index *index, uint32_t model, uint64_t lora,
                                  uint32_t block_size) {
    return mix64(index->models[model].seed ^ mix64(lora + index->secret) ^ block_size);
}

static inline bool index_is_over(const Index *index) { return index->work >= index->work_limit; }

/* Begins a step that ends at this limit of work. */
static inline void index_begin(Index *index, uint64_t limit) {
    index->work = 0;
    index->work_limit = limit;
}

/* Makes room to compute keys of blocks of this size; returns false if out of memory. */
bool index_widen(Index *index, uint32_t block_size);

#endif
