/* Sets of holders, each kept once: a row of the index needs four bytes however many holders it has.
 *
 * A holder is a 32-bit id, a set a sorted array of holders. Set 0 is the empty set. Each set counts
 * the rows that use it, and is freed with the last. A small cache keeps the results of adding or
 * removing a holder, because the same few transitions recur.
 */
#ifndef KVSTEER_SETS_H
#define KVSTEER_SETS_H

#include "table.h"

typedef uint32_t Holder;
typedef uint32_t SetId;

#define EMPTY_SET 0u
#define NO_SET UINT32_MAX /* out of memory */
#define TRANSITIONS 4096u

typedef struct {
    Holder *members;
    uint32_t length;
    uint32_t rows;       /* that use it */
    uint32_t generation; /* of this id; makes cached transitions of a freed set invalid */
    SetId next;          /* in its bucket, or in the list of free ids */
    uint64_t hash;
} Set;

typedef struct {
    SetId from, to;
    uint32_t from_generation, to_generation;
    Holder holder;
    bool adds, known;
} Transition;

typedef struct {
    Set *sets; /* sets[0] is unused */
    uint32_t count, capacity;
    SetId free_ids;
    SetId *buckets;
    uint32_t bucket_count; /* a power of two */
    uint32_t in_use;
    size_t member_bytes;
    Transition transitions[TRANSITIONS];
    Holder *scratch;
    uint32_t scratch_capacity;
} Sets;

static inline void sets_init(Sets *sets) { memset(sets, 0, sizeof *sets); }

static inline void sets_free(Sets *sets) {
    for (uint32_t id = 1; id < sets->count; id++) free(sets->sets[id].members);
    free(sets->sets);
    free(sets->buckets);
    free(sets->scratch);
    sets_init(sets);
}

static inline size_t sets_bytes(const Sets *sets) {
    return sets->capacity * sizeof(Set) + sets->bucket_count * sizeof(SetId) + sets->member_bytes;
}

/* What a holder adds to the hash of a set: their sum, which one more or less changes at once. */
static inline uint64_t sets_hash(Holder holder) { return mix64(holder + 0x9e3779b97f4a7c15u); }

/* Returns where a holder is in a set, or would be. */
static inline uint32_t sets_position(const Set *set, Holder holder) {
    uint32_t low = 0, high = set->length;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (set->members[middle] < holder)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline bool sets_contain(const Sets *sets, SetId id, Holder holder) {
    if (id == EMPTY_SET) return false;
    const Set *set = &sets->sets[id];
    uint32_t at = sets_position(set, holder);
    return at < set->length && set->members[at] == holder;
}

static inline bool sets_rebucket(Sets *sets, uint32_t bucket_count) {
    SetId *buckets = calloc(bucket_count, sizeof *buckets);
    if (!buckets) return false;
    for (uint32_t n = 0; n < sets->bucket_count; n++) {
        for (SetId id = sets->buckets[n], next; id; id = next) {
            next = sets->sets[id].next;
            SetId *head = &buckets[sets->sets[id].hash & (bucket_count - 1)];
            sets->sets[id].next = *head;
            *head = id;
        }
    }
    free(sets->buckets);
    sets->buckets = buckets;
    sets->bucket_count = bucket_count;
    return true;
}

static inline SetId sets_new_id(Sets *sets) {
    SetId id = sets->free_ids;
    if (id) {
        sets->free_ids = sets->sets[id].next;
        return id;
    }
    if (sets->count >= sets->capacity) {
        uint32_t capacity = sets->capacity ? sets->capacity + sets->capacity / 2 : 64;
        Set *grown = realloc(sets->sets, capacity * sizeof *grown);
        if (!grown) return NO_SET;
        sets->sets = grown;
        sets->capacity = capacity;
        if (!sets->count) memset(&sets->sets[sets->count++], 0, sizeof *grown);
    }
    id = sets->count++;
    memset(&sets->sets[id], 0, sizeof *sets->sets);
    return id;
}

/* Returns the id of the set with these members, creating it if needed; NO_SET if out of memory. */
static inline SetId sets_intern(Sets *sets, const Holder *members, uint32_t length,
                                uint64_t hash) {
    if (!length) return EMPTY_SET;
    size_t bytes = length * sizeof *members;
    if (sets->bucket_count) {
        SetId id = sets->buckets[hash & (sets->bucket_count - 1)];
        for (; id; id = sets->sets[id].next) {
            const Set *set = &sets->sets[id];
            if (set->hash == hash && set->length == length && !memcmp(set->members, members, bytes))
                return id;
        }
    }
    if (sets->in_use >= sets->bucket_count &&
        !sets_rebucket(sets, sets->bucket_count ? sets->bucket_count * 2 : 64))
        return NO_SET;
    Holder *own = malloc(bytes);
    if (!own) return NO_SET;
    SetId id = sets_new_id(sets);
    if (id == NO_SET) {
        free(own);
        return NO_SET;
    }
    memcpy(own, members, bytes);
    Set *set = &sets->sets[id];
    SetId *head = &sets->buckets[hash & (sets->bucket_count - 1)];
    *set = (Set){own, length, 0, set->generation, *head, hash};
    *head = id;
    sets->in_use++;
    sets->member_bytes += bytes;
    return id;
}

/* Frees a set that no row uses. */
static inline void sets_drop_unused(Sets *sets, SetId id) {
    if (id == EMPTY_SET || sets->sets[id].rows) return;
    Set *set = &sets->sets[id];
    SetId *link = &sets->buckets[set->hash & (sets->bucket_count - 1)];
    while (*link != id) link = &sets->sets[*link].next;
    *link = set->next;
    sets->member_bytes -= set->length * sizeof *set->members;
    free(set->members);
    set->members = NULL;
    set->length = 0;
    set->generation++;
    set->next = sets->free_ids;
    sets->free_ids = id;
    sets->in_use--;
}

static inline Transition *sets_transition(Sets *sets, SetId from, Holder holder, bool adds) {
    uint64_t hash = mix64(((uint64_t)from << 33) ^ ((uint64_t)holder << 1) ^ adds);
    return &sets->transitions[hash & (TRANSITIONS - 1)];
}

static inline bool sets_make_room(Sets *sets, uint32_t length) {
    if (length <= sets->scratch_capacity) return true;
    Holder *grown = realloc(sets->scratch, 2 * length * sizeof *grown);
    if (!grown) return false;
    sets->scratch = grown;
    sets->scratch_capacity = 2 * length;
    return true;
}

static inline SetId sets_with(Sets *sets, SetId from, Holder holder) {
    if (from == EMPTY_SET) return sets_intern(sets, &holder, 1, sets_hash(holder));
    const Set *set = &sets->sets[from];
    uint32_t at = sets_position(set, holder);
    if (!sets_make_room(sets, set->length + 1)) return NO_SET;
    memcpy(sets->scratch, set->members, at * sizeof holder);
    sets->scratch[at] = holder;
    memcpy(sets->scratch + at + 1, set->members + at, (set->length - at) * sizeof holder);
    return sets_intern(sets, sets->scratch, set->length + 1, set->hash + sets_hash(holder));
}

static inline SetId sets_without(Sets *sets, SetId from, Holder holder) {
    const Set *set = &sets->sets[from];
    uint32_t at = sets_position(set, holder);
    if (!sets_make_room(sets, set->length)) return NO_SET;
    memcpy(sets->scratch, set->members, at * sizeof holder);
    memcpy(sets->scratch + at, set->members + at + 1, (set->length - at - 1) * sizeof holder);
    return sets_intern(sets, sets->scratch, set->length - 1, set->hash - sets_hash(holder));
}

/* Returns the set with a holder added (not in it) or removed (in it), if it is remembered; such a
 * holder was not in the set, or was in it. Otherwise NO_SET. */
static inline SetId sets_remembered(Sets *sets, SetId from, Holder holder, bool adds) {
    const Transition *known = sets_transition(sets, from, holder, adds);
    uint32_t generation = from ? sets->sets[from].generation : 0;
    bool is_same = known->known && known->from == from && known->holder == holder &&
                   known->adds == adds && known->from_generation == generation;
    if (!is_same) return NO_SET;
    bool is_kept =
        known->to == EMPTY_SET || known->to_generation == sets->sets[known->to].generation;
    return is_kept ? known->to : NO_SET;
}

/* Returns the set with a holder added (not in it) or removed (in it); NO_SET if out of memory. */
static inline SetId sets_step(Sets *sets, SetId from, Holder holder, bool adds) {
    SetId remembered = sets_remembered(sets, from, holder, adds);
    if (remembered != NO_SET) return remembered;
    uint32_t generation = from ? sets->sets[from].generation : 0;
    SetId to = adds ? sets_with(sets, from, holder) : sets_without(sets, from, holder);
    if (to != NO_SET) {
        uint32_t to_generation = to ? sets->sets[to].generation : 0;
        *sets_transition(sets, from, holder, adds) =
            (Transition){from, to, generation, to_generation, holder, adds, true};
    }
    return to;
}

#endif
