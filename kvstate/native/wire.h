/* Event batches as vLLM and similar engines publish them, parsed without building Python objects.
 *
 * [timestamp, [event...], rank?] in msgpack; an event is a tagged array (vLLM before 0.24) or a
 * tagged map (since). Positions and names: vllm.distributed.kv_events, as in
 * kvstate/wire/zmq_wire.py. For anything unexpected wire_begin() or wire_parse() returns
 * WIRE_SURPRISE, before anything is applied: the typed decoder in Python then names the fault.
 */
#ifndef KVSTEER_WIRE_H
#define KVSTEER_WIRE_H

#include "index.h"
#include "reader.h"

typedef enum { WIRE_OK, WIRE_SURPRISE, WIRE_NO_MEMORY, WIRE_MORE } WireResult;

/* Limits of one message, as in kvstate/wire/zmq_wire.py. */
#define MAX_EVENTS 65536u
#define MAX_HASHES 262144u
#define MAX_HASH_BYTES 64u
#define MAX_WINDOW 0xffffffu /* tokens */

typedef enum {
    EVENT_STORED, /* the first three in the order of their tags in wire.c */
    EVENT_REMOVED,
    EVENT_CLEARED,
    EVENT_COPIED,            /* stored, known by hash only */
    EVENT_OTHER_GROUP,       /* stored, but not the whole prefix */
    EVENT_OTHER_LOCALITY,    /* on another server */
    EVENT_FOREIGN_OWNERSHIP, /* not managed by the engine */
} EventKind;

/* One event; hashes and tokens are ranges of the batch's arrays. */
typedef struct {
    EventKind kind;
    PoolName pool;
    size_t first_hash, first_token;
    uint32_t hash_count;
    size_t token_count;
    bool has_parent;
    bool tells_left; /* a removal: its tokens are how many copies of each block are left */
    uint64_t parent, lora;
    GroupKind group_kind;
    uint32_t reach; /* tokens of the group that a prefix needs before its end, or NO_REACH */
    int8_t names_salts, names_loras; /* as in Owner */
} WireEvent;

/* A batch during and after parsing; its arrays may be reused for the next one. */
typedef struct {
    Reader reader;
    size_t fields, left; /* of the batch; events not read yet */
    WireEvent *events;
    uint64_t *hashes;
    uint32_t *tokens;
    size_t event_count, hash_count, token_count;
    size_t event_room, hash_room, token_room;
} WireBatch;

/* wire_begin() begins a payload; wire_parse() reads its events up to the index's limit of work, and
 * returns WIRE_MORE if some are left. */
WireResult wire_begin(WireBatch *batch, const unsigned char *bytes, size_t length);
WireResult wire_parse(Index *index, WireBatch *batch);
void wire_free(WireBatch *batch);

/* Finds the number and tier of a medium by its name in upper case; false if it is unknown. */
bool wire_medium(const unsigned char *name, size_t length, uint32_t *medium, uint32_t *tier);
/* Finds the tier of a medium by its number; false if there is no such medium. */
bool wire_tier_of(uint32_t medium, uint32_t *tier);
/* Returns the number that stands for an engine hash given as bytes. */
uint64_t wire_fold_hash(Index *index, const unsigned char *bytes, size_t length);
/* Returns the number that stands for an adapter known by this name. */
uint64_t wire_lora(Index *index, const unsigned char *name, size_t length);

#endif
