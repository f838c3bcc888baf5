/* Event batches as vLLM and its kin publish them, parsed without building Python objects.
 *
 * [timestamp, [event...], rank?] in msgpack; an event is a tagged array (vLLM before 0.24) or a
 * tagged map (since). Positions and names: vllm.distributed.kv_events, as kvstate/wire/zmq_wire.py has
 * them. Anything that is not exactly what is expected makes wire_parse() say WIRE_SURPRISE, before
 * anything was applied: the typed decoder in Python then names the fault.
 */
#ifndef KVSTEER_WIRE_H
#define KVSTEER_WIRE_H

#include "index.h"
#include "reader.h"

typedef enum { WIRE_OK, WIRE_SURPRISE, WIRE_NO_MEMORY, WIRE_MORE } WireResult;

/* Of one message, as kvstate/wire/zmq_wire.py has them. */
#define MAX_EVENTS 65536u
#define MAX_HASHES 262144u
#define MAX_HASH_BYTES 64u

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
    bool has_parent;
    uint64_t parent, lora;
    GroupKind group_kind;
    int8_t names_salts, names_loras; /* as in Owner */
} WireEvent;

/* A batch while it is parsed, and then; its arrays may be used again for the next one. */
typedef struct {
    Reader reader;
    size_t fields, left; /* of the batch, and events that are not read yet */
    WireEvent *events;
    uint64_t *hashes;
    uint32_t *tokens;
    size_t event_count, hash_count, token_count;
    size_t event_room, hash_room, token_room;
} WireBatch;

/* Begins a payload, then reads its events until the index's limit of work; WIRE_MORE where some are
 * left. */
WireResult wire_begin(WireBatch *batch, const unsigned char *bytes, size_t length);
WireResult wire_parse(Index *index, WireBatch *batch);
void wire_free(WireBatch *batch);

/* The number and tier of a medium's name, upper case; false if it is unknown. */
bool wire_medium(const unsigned char *name, size_t length, uint32_t *medium, uint32_t *tier);
/* An engine hash given as bytes, as the number that stands for it here. */
uint64_t wire_fold_hash(Index *index, const unsigned char *bytes, size_t length);
/* The number that stands for an adapter known by this name. */
uint64_t wire_lora(Index *index, const unsigned char *name, size_t length);

#endif
