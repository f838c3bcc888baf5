/* The gRPC calls of one connection (grpc/grpc, doc/PROTOCOL-HTTP2.md): bytes in, messages and bytes
 * out.
 *
 * extproc/_core.pyi describes the interface. Tests compare it with one in Python
 * (tests/oracles/http2), event by event and byte by byte. */
#ifndef KVSTEER_SESSION_H
#define KVSTEER_SESSION_H

#include "connection.h"

/* extproc.http2.call_events */
typedef enum { CALL_OPENED, CALL_PART, CALL_MESSAGE, CALL_ENDED, CALL_FAILED, CALL_ABORTED } CallEventKind;

/* bytes: of CALL_OPENED the path, of CALL_PART and CALL_MESSAGE the content; `owned` is freed with
 * the event. is_read: of CALL_OPENED and a whole CALL_MESSAGE of a call on `read_path`. trace: of
 * CALL_OPENED. status, text, length: of CALL_FAILED; a text with a %llu in it gets the length. */
typedef struct {
    CallEventKind kind;
    uint32_t stream_id;
    bool is_read;
    Text bytes, trace;
    uint8_t *owned;
    int status;
    const char *text;
    unsigned long long length;
} CallEvent;

typedef struct {
    Connection connection;
    int64_t max_message_bytes;
    Text read_path; /* of the calls whose messages are read, empty for none */
    Buffer answer_head, ok_trailers, block; /* block: the present one of another answer */
    CallEvent *events;
    size_t event_count, event_room;
} Session;

void session_init(Session *session, const Limits *limits, int64_t max_message_bytes,
                  Amount *budget);
void session_free(Session *session);

/* Takes bytes and fills `events`, which are valid until session_forget_read. */
void session_receive(Session *session, const uint8_t *data, size_t length);
void session_tick(Session *session);
void session_forget_read(Session *session);

/* Sends a message of a call's answer; returns how many bytes of it wait for the peer, -1 if the
 * call is over. */
int64_t session_answer(Session *session, uint32_t stream_id, const uint8_t *message,
                       size_t length);
/* The same, of a message in three pieces, of which the middle one is only lent: however this ends,
 * the loan is ended once. */
int64_t session_lend(Session *session, uint32_t stream_id, Text before, Loan loan, Text behind);
void session_finish(Session *session, uint32_t stream_id, int status, const uint8_t *text,
                    size_t length);
int64_t session_queued(const Session *session, uint32_t stream_id);
void session_hold(Session *session, uint32_t stream_id);
void session_unhold(Session *session, uint32_t stream_id);
void session_close(Session *session);

#endif
