/* An owner's attention groups; kvstate/wire/extras.py explains them, and has the same in Python. */
#ifndef KVSTEER_GROUPS_H
#define KVSTEER_GROUPS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define NO_GROUP (-1)
#define MAX_GROUPS 64u

typedef enum { KIND_UNNAMED, KIND_PREFIX, KIND_OTHER } GroupKind; /* as a store names it */
typedef enum { GROUP_INDEXED, GROUP_OTHER, GROUP_DOUBTFUL } Admission;
typedef enum { STATE_UNNAMED, STATE_PREFIX, STATE_OTHER, STATE_CONTRADICTED } GroupState;

typedef struct {
    int64_t number;
    GroupState state;
} Group;

typedef struct {
    Group *known;
    uint32_t count, unnamed;
} Groups;

static inline void groups_forget(Groups *groups) {
    free(groups->known);
    *groups = (Groups){0};
}

static inline Group *groups_find(const Groups *groups, int64_t number) {
    for (uint32_t n = 0; n < groups->count; n++)
        if (groups->known[n].number == number) return &groups->known[n];
    return NULL;
}

/* How blocks of a group are treated, by the stores so far. */
static inline Admission groups_admission(const Groups *groups, int64_t number) {
    const Group *group = number == NO_GROUP ? NULL : groups_find(groups, number);
    if (!group || group->state == STATE_PREFIX) return GROUP_INDEXED;
    if (group->state == STATE_OTHER) return GROUP_OTHER;
    return group->state == STATE_UNNAMED && groups->unnamed == 1 ? GROUP_INDEXED : GROUP_DOUBTFUL;
}

static inline GroupState groups_next(const Group *group, GroupKind kind) {
    if (kind == KIND_PREFIX) return STATE_PREFIX;
    if (kind == KIND_UNNAMED) return group ? group->state : STATE_UNNAMED;
    return !group || group->state == STATE_OTHER ? STATE_OTHER : STATE_CONTRADICTED;
}

/* Notes a store; returns how its blocks are treated. Without memory for a new group, they are not
 * indexed. */
static inline Admission groups_stored(Groups *groups, int64_t number, GroupKind kind) {
    if (number == NO_GROUP) return kind == KIND_OTHER ? GROUP_OTHER : GROUP_INDEXED;
    Group *group = groups_find(groups, number);
    GroupState next = groups_next(group, kind);
    if (!group) {
        if (groups->count == MAX_GROUPS) return GROUP_OTHER;
        Group *known = realloc(groups->known, (groups->count + 1) * sizeof *known);
        if (!known) return GROUP_OTHER;
        groups->known = known;
        group = &known[groups->count++];
        *group = (Group){number, STATE_PREFIX};
    }
    groups->unnamed += (next == STATE_UNNAMED) - (group->state == STATE_UNNAMED);
    group->state = next;
    return groups_admission(groups, number);
}

#endif
