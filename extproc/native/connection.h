/* The server's side of one HTTP/2 connection (RFC 9113): bytes in, events and bytes out.
 *
 * Tests compare it with tests.oracles.http2.connection, event by event and byte by byte. */
#ifndef KVSTEER_CONNECTION_H
#define KVSTEER_CONNECTION_H

#include "head.h"

/* extproc.http2.limits.Limits, which describes them. */
typedef struct {
    int64_t max_streams, max_header_block_bytes, max_header_list_bytes, max_continuations;
    int64_t stream_window_bytes, connection_window_bytes;
    int64_t pings_a_tick, settings_a_tick, idle_frames_a_tick, idle_frames_a_stream;
    int64_t rapid_resets_a_tick, faults_a_tick, preface_ticks, first_ticks, stall_ticks;
} Limits;

/* Bytes kept by all connections of a server together, or by those of one peer, which takes them of
 * the whole. */
typedef struct Amount {
    int64_t max_bytes, used_bytes;
    struct Amount *whole; /* NULL: this is it */
} Amount;

/* A peer may hold so many times what it leaves to others. */
#define PARTS 3

static inline bool amount_take(Amount *amount, int64_t size) {
    Amount *whole = amount->whole ? amount->whole : amount;
    int64_t left = whole->max_bytes - whole->used_bytes - size;
    if (left < 0) return false;
    if (amount->whole) {
        if (amount->used_bytes + size > PARTS * left) return false;
        amount->used_bytes += size;
    }
    whole->used_bytes += size;
    return true;
}

static inline void amount_give_back(Amount *amount, int64_t size) {
    amount->used_bytes -= size;
    if (amount->whole) amount->whole->used_bytes -= size;
}

/* Bytes that belong to somebody else until all are sent, or none is wanted any more: then `give_back`
 * is called once with their owner. bytes: what is left of them. */
typedef struct {
    Text bytes;
    void *owner; /* NULL: nothing is lent */
    void (*give_back)(void *owner);
} Loan;

void loan_end(Loan *loan);

typedef struct Stream Stream;

/* A place in a list of streams, in the order in which they were added. */
typedef struct {
    Stream *before, *after;
    bool is_in;
} Link;

/* is_open: at the level of HTTP/2. The call is the session's (session.h): it may outlast its stream
 * until its events are taken. */
struct Stream {
    uint32_t id;
    bool is_open, is_used, is_received, has_trailers;
    int64_t window, unreturned; /* of the request */
    int64_t credit;             /* of the answer */
    int64_t refused_bytes;      /* of the budget, until a refused request's stream is closed */
    bool has_expected;
    uint64_t expected, received;
    Buffer queue; /* of the answer, then what is lent, then what came after that */
    Loan loan;
    Buffer behind, trailers;
    int64_t stalled_ticks;
    Link waiting, ready, called;
    bool has_call, has_message, is_whole, is_failed, has_answer, is_held, is_read;
    int64_t withheld, charged, owed_ticks;
    uint8_t prefix[5];
    size_t prefix_length, parts_bytes;
    uint64_t missing;
    Buffer incomplete;
};

typedef struct {
    Stream *first, *last;
    size_t offset; /* of its links */
} StreamList;

/* Streams by number: open addressing with linear probing. */
typedef struct {
    Stream **slots;
    size_t capacity, used;
} StreamTable;

typedef enum { OPENED, RECEIVED, ABORTED } FrameEventKind;

/* bytes: of a request, part of what was read. */
typedef struct {
    FrameEventKind kind;
    uint32_t stream_id;
    bool is_last;
    Head head;
    Text bytes;
} FrameEvent;

typedef struct {
    FrameEvent *items;
    size_t count, room;
} FrameEvents;

#define MAX_RESET_KEPT 1000u

typedef struct {
    Limits limits;
    Amount *budget;

    bool has_failed, is_broken; /* is_broken: there was no memory */
    int32_t fault_code;
    const char *fault_text;

    size_t preface_length;
    Buffer unread;              /* of an incomplete frame, then what was read last */
    int64_t data_missing;       /* of a DATA frame that arrives in parts */
    uint8_t data_flags;
    uint32_t data_stream;

    bool is_joining, joins_last; /* HEADERS without END_HEADERS came */
    uint32_t joined_stream;
    int64_t continuations;
    Buffer block;

    Hpack hpack;
    Buffer texts; /* of the heads of this read */
    Buffer cached_block, cached_texts; /* of the last block without state */
    Head cached_head;

    bool is_greeted, is_acknowledged, has_said_goodbye, is_draining, has_last_taken;
    uint32_t last_taken, last_id;
    int64_t ticks, pings, settings, idle_frames, rapid_resets, faults;

    StreamTable streams;
    int64_t open_count;
    int64_t window, unreturned;
    uint32_t reset_ids[MAX_RESET_KEPT]; /* a ring */
    uint32_t reset_count, reset_next;

    Buffer out;
    bool is_due, is_paused;
    int64_t out_window, out_initial, pumped;
    StreamList waiting, ready, called;

    FrameEvents events;
} Connection;

void connection_init(Connection *connection, const Limits *limits, Amount *budget);
void connection_free(Connection *connection);

/* Reads what comes and fills `events`, which are valid until connection_forget_read. */
void connection_receive(Connection *connection, const uint8_t *data, size_t length);
void connection_forget_read(Connection *connection);

/* Fills `out` with what may be sent now. */
void connection_pump(Connection *connection);

/* Sends a part of an answer; false if the stream is gone, or was reset for want of room.
 * prefix: bytes before the message, which belong to it. */
bool connection_send(Connection *connection, uint32_t stream_id, const uint8_t *prefix,
                     size_t prefix_length, const uint8_t *data, size_t length);
/* Sends a part of an answer as `connection_send`, in three pieces, of which the middle one is only
 * lent. The loan is ended if this fails. */
bool connection_lend(Connection *connection, uint32_t stream_id, Text before, Loan loan,
                     Text behind);
void connection_send_head(Connection *connection, uint32_t stream_id, const Buffer *block);
void connection_end(Connection *connection, uint32_t stream_id, const Buffer *block, bool is_due);
void connection_reset(Connection *connection, uint32_t stream_id, uint32_t code);
void connection_consume(Connection *connection, Stream *stream, int64_t size);
void connection_drain(Connection *connection);

/* Forgets the streams of a lost connection, and gives back what they keep. */
void connection_close(Connection *connection);

/* Fills `events` with the streams that stalled. */
void connection_tick(Connection *connection);

bool connection_is_over(const Connection *connection);

/* Returns a stream, open or with a call; NULL if there is none. */
Stream *connection_find(const Connection *connection, uint32_t stream_id);

/* Returns how many bytes of a stream's answer wait. */
size_t stream_queued(const Stream *stream);

/* Frees a stream that is neither open nor has a call. */
void connection_release(Connection *connection, Stream *stream);

void list_add(StreamList *list, Stream *stream);
void list_remove(StreamList *list, Stream *stream);
Stream *list_next(const StreamList *list, const Stream *stream);

#define ERROR_NONE 0u
#define PROTOCOL_ERROR 1u
#define FLOW_CONTROL_ERROR 3u
#define SETTINGS_TIMEOUT 4u
#define STREAM_CLOSED 5u
#define FRAME_SIZE_ERROR 6u
#define REFUSED_STREAM 7u
#define CANCEL 8u
#define COMPRESSION_ERROR 9u
#define ENHANCE_YOUR_CALM 11u

#endif
