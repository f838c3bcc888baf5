#include "session.h"

#define OK 0
#define DEADLINE_EXCEEDED 4
#define RESOURCE_EXHAUSTED 8
#define UNIMPLEMENTED 12
#define INTERNAL 13

#define PREFIX_BYTES 5u

/* What a call takes of the budget besides its content: before its first message, and from then on.
 * A refused request whose answer waits takes as much as the first. */
#define OPEN_BYTES 1024
#define CALL_BYTES 4096

/* tests.oracles.http2.grpc_messages.NOT_GRPC */
#define NOT_GRPC "This port serves gRPC: POST with content-type application/grpc.\n"

/* A message of this length or more is passed on in parts of about this length. */
#define LONG_BYTES (1024u * 1024u)
#define PART_BYTES (64u * 1024u)

static void add_field(Buffer *block, const char *name, const char *value) {
    hpack_encode(block, name, (const uint8_t *)value, strlen(value));
}

void session_init(Session *session, const Limits *limits, int64_t max_message_bytes,
                  Amount *budget) {
    *session = (Session){.max_message_bytes = max_message_bytes};
    connection_init(&session->connection, limits, budget);
    add_field(&session->answer_head, ":status", "200");
    add_field(&session->answer_head, "content-type", "application/grpc");
    add_field(&session->ok_trailers, "grpc-status", "0");
    session->connection.is_broken |=
        session->answer_head.is_broken || session->ok_trailers.is_broken;
}

void session_free(Session *session) {
    session_forget_read(session);
    connection_free(&session->connection);
    buffer_free(&session->answer_head);
    buffer_free(&session->ok_trailers);
    buffer_free(&session->block);
    free(session->events);
    session->events = NULL;
}

static CallEvent *add_event(Session *session, CallEventKind kind, uint32_t stream_id) {
    if (session->event_count == session->event_room) {
        size_t room = session->event_room ? session->event_room * 2 : 16;
        CallEvent *events = realloc(session->events, room * sizeof *events);
        if (!events) {
            session->connection.is_broken = true;
            return NULL;
        }
        session->events = events;
        session->event_room = room;
    }
    CallEvent *event = &session->events[session->event_count++];
    *event = (CallEvent){.kind = kind, .stream_id = stream_id};
    return event;
}

static Stream *find_call(const Session *session, uint32_t stream_id) {
    Stream *stream = connection_find(&session->connection, stream_id);
    return stream && stream->has_call ? stream : NULL;
}

/* Books what a call keeps; false if there is no room for more. */
static bool charge(Session *session, Stream *call, int64_t bytes) {
    Amount *budget = session->connection.budget;
    if (bytes > call->charged && !amount_take(budget, bytes - call->charged)) return false;
    if (bytes < call->charged) amount_give_back(budget, call->charged - bytes);
    call->charged = bytes;
    return true;
}

static void forget_message(Stream *call) {
    buffer_free(&call->incomplete);
    call->prefix_length = call->parts_bytes = 0;
    call->missing = 0;
}

/* What a call takes besides its content. */
static int64_t least_bytes(const Stream *call) {
    return call->has_message ? CALL_BYTES : OPEN_BYTES;
}

static int64_t kept_bytes(const Stream *call) {
    return (int64_t)(call->prefix_length + buffer_length(&call->incomplete) + call->parts_bytes);
}

static void forget_call(Session *session, Stream *call) {
    charge(session, call, 0);
    forget_message(call);
    list_remove(&session->connection.called, call);
    call->has_call = false;
    connection_release(&session->connection, call);
}

/* Reports that a call must end with an error; what else comes of its request is dropped. */
static CallEvent *fail_call(Session *session, Stream *call, int status, const char *text) {
    forget_message(call);
    charge(session, call, least_bytes(call));
    call->is_failed = true;
    CallEvent *event = add_event(session, CALL_FAILED, call->id);
    if (!event) return NULL;
    event->status = status;
    event->text = text;
    return event;
}

/* --- requests --- */

/* Begins the answer to a request that is not of gRPC, and sends its content. */
static void explain_refusal(Session *session, uint32_t stream_id, RequestKind kind) {
    static const char TEXT[] = NOT_GRPC;
    Buffer *block = &session->block;
    add_field(block, ":status", kind == WRONG_METHOD ? "405" : "415");
    if (kind == WRONG_METHOD) add_field(block, "allow", "POST");
    add_field(block, "content-type", "text/plain");
    connection_send_head(&session->connection, stream_id, block);
    connection_send(&session->connection, stream_id, NULL, 0, (const uint8_t *)TEXT,
                    sizeof TEXT - 1);
    buffer_clear(block);
}

static void refuse_request(Session *session, uint32_t stream_id, const Head *head) {
    Buffer *block = &session->block;
    RequestKind kind = head_kind(head);
    buffer_clear(block);
    if (head->is_head) { /* RFC 9110, section 9.3.2: its answer has no content */
        add_field(block, ":status", "405");
        add_field(block, "allow", "POST");
    } else if (kind != COMPRESSED) {
        explain_refusal(session, stream_id, kind);
    } else {
        buffer_add(block, session->answer_head.bytes, buffer_length(&session->answer_head));
        add_field(block, "grpc-status", "12");
        add_field(block, "grpc-message", "compressed messages are not supported");
    }
    session->connection.is_broken |= block->is_broken;
    connection_end(&session->connection, stream_id, block, true);
}

static void open_call(Session *session, Stream *call, const FrameEvent *opened) {
    const Head *head = &opened->head;
    call->charged = OPEN_BYTES;
    call->is_whole = opened->is_last;
    list_add(&session->connection.called, call);
    CallEvent *event = add_event(session, CALL_OPENED, call->id);
    if (!event) return;
    event->bytes = (Text){head->texts->bytes + head->path_at, head->path_length};
    call->is_read = session->read_path.length && event->bytes.length == session->read_path.length &&
                    !memcmp(event->bytes.bytes, session->read_path.bytes, event->bytes.length);
    event->is_read = call->is_read;
    if (head->trace_length)
        event->trace = (Text){head->texts->bytes + head->trace_at, head->trace_length};
    if (opened->is_last) add_event(session, CALL_ENDED, call->id);
}

static void take_opened(Session *session, const FrameEvent *opened) {
    Connection *connection = &session->connection;
    Stream *call = connection_find(connection, opened->stream_id);
    if (!call) return;
    bool is_call = head_kind(&opened->head) == GRPC_CALL;
    bool is_wanted = is_call || call->is_open; /* else it was reset in the same read */
    bool has_room = is_wanted && amount_take(connection->budget, OPEN_BYTES);
    if (is_call && has_room) {
        open_call(session, call, opened);
        return;
    }
    if (has_room) {
        call->refused_bytes = OPEN_BYTES;
        refuse_request(session, call->id, &opened->head);
    } else {
        connection_reset(connection, call->id, REFUSED_STREAM);
    }
    call->has_call = false;
    connection_release(connection, call);
}

/* Reads the rest of a message's prefix; false if it is incomplete, or the call fails by it. */
static bool read_prefix(Session *session, Stream *call, Text *piece) {
    while (call->prefix_length < PREFIX_BYTES) {
        if (!piece->length) return false;
        call->prefix[call->prefix_length++] = *piece->bytes++;
        piece->length--;
        if (call->prefix_length < PREFIX_BYTES) continue;
        const uint8_t *prefix = call->prefix;
        call->missing = (uint64_t)prefix[1] << 24 | (uint64_t)prefix[2] << 16 |
                        (uint64_t)prefix[3] << 8 | prefix[4];
        uint64_t length = call->missing;
        if (prefix[0]) {
            fail_call(session, call, UNIMPLEMENTED, "compressed messages are not supported");
            return false;
        }
        if ((int64_t)length > session->max_message_bytes) {
            CallEvent *event = fail_call(session, call, RESOURCE_EXHAUSTED,
                                         "message of %llu bytes is too long");
            if (event) event->length = length;
            return false;
        }
    }
    return true;
}

/* Passes on what is kept of a message: the last of it, or a part. */
static void pass_on(Session *session, Stream *call, CallEventKind kind) {
    CallEvent *event = add_event(session, kind, call->id);
    if (!event) return;
    event->bytes = (Text){buffer_content(&call->incomplete), buffer_length(&call->incomplete)};
    event->owned = call->incomplete.bytes;
    event->is_read = call->is_read && !call->parts_bytes;
    call->parts_bytes += event->bytes.length;
    call->incomplete = (Buffer){0};
}

static void end_message(Stream *call) {
    call->prefix_length = call->parts_bytes = 0;
    call->has_message = true;
    call->owed_ticks = 0;
}

static void read_content(Session *session, Stream *call, Text *piece) {
    Buffer *incomplete = &call->incomplete;
    size_t size = piece->length < call->missing ? piece->length : (size_t)call->missing;
    Text part = {piece->bytes, size};
    *piece = (Text){piece->bytes + size, piece->length - size};
    call->missing -= size;
    if (!call->missing && !buffer_length(incomplete) && !call->parts_bytes) {
        CallEvent *event = add_event(session, CALL_MESSAGE, call->id);
        if (event) event->bytes = part;
        if (event) event->is_read = call->is_read;
        end_message(call);
        return;
    }
    buffer_add(incomplete, part.bytes, part.length);
    session->connection.is_broken |= incomplete->is_broken;
    bool is_long = call->parts_bytes || buffer_length(incomplete) + call->missing >= LONG_BYTES;
    if (!call->missing) {
        pass_on(session, call, CALL_MESSAGE);
        end_message(call);
    } else if (is_long && buffer_length(incomplete) >= PART_BYTES) {
        pass_on(session, call, CALL_PART);
    }
}

static void read_piece(Session *session, Stream *call, Text piece) {
    do {
        if (!read_prefix(session, call, &piece)) break;
        read_content(session, call, &piece);
    } while (piece.length && !session->connection.is_broken);
    if (!call->is_failed && !charge(session, call, least_bytes(call) + kept_bytes(call)))
        fail_call(session, call, RESOURCE_EXHAUSTED, "no memory left for unfinished messages");
}

static void take_received(Session *session, const FrameEvent *received) {
    Stream *call = find_call(session, received->stream_id);
    if (!call) return;
    int64_t size = (int64_t)received->bytes.length;
    if (call->is_held)
        call->withheld += size;
    else if (size)
        connection_consume(&session->connection, call, size);
    if (size && !call->is_failed) read_piece(session, call, received->bytes);
    if (!received->is_last || call->is_failed) return;
    call->is_whole = true;
    if (kept_bytes(call))
        fail_call(session, call, INTERNAL, "the last message is incomplete");
    else
        add_event(session, CALL_ENDED, call->id);
}

static void take_aborted(Session *session, uint32_t stream_id) {
    Stream *call = find_call(session, stream_id);
    if (!call) return;
    forget_call(session, call);
    add_event(session, CALL_ABORTED, stream_id);
}

static void take_events(Session *session) {
    const FrameEvents *events = &session->connection.events;
    for (size_t n = 0; n < events->count && !session->connection.is_broken; n++) {
        const FrameEvent *event = &events->items[n];
        if (event->kind == OPENED)
            take_opened(session, event);
        else if (event->kind == RECEIVED)
            take_received(session, event);
        else
            take_aborted(session, event->stream_id);
    }
}

void session_receive(Session *session, const uint8_t *data, size_t length) {
    connection_receive(&session->connection, data, length);
    take_events(session);
}

void session_forget_read(Session *session) {
    for (size_t n = 0; n < session->event_count; n++) free(session->events[n].owned);
    session->event_count = 0;
    connection_forget_read(&session->connection);
}

static void tick_call(Session *session, Stream *call) {
    if (call->is_failed) return;
    const Limits *limits = &session->connection.limits;
    int64_t most = call->has_message ? limits->stall_ticks : limits->first_ticks;
    if ((call->has_message || call->is_whole) && !kept_bytes(call)) {
        call->owed_ticks = 0;
    } else if (++call->owed_ticks > most) {
        fail_call(session, call, DEADLINE_EXCEEDED, "no message in time");
    }
}

void session_tick(Session *session) {
    connection_tick(&session->connection);
    take_events(session);
    const StreamList *called = &session->connection.called;
    for (Stream *call = called->first; call; call = list_next(called, call))
        tick_call(session, call);
}

/* --- answers --- */

/* Begins an answer, unless it has begun. Returns its call, NULL if that is over. */
static Stream *begin_answer(Session *session, uint32_t stream_id, size_t length) {
    Stream *call = find_call(session, stream_id);
    if (!call || length > UINT32_MAX) return NULL;
    if (!call->has_answer)
        connection_send_head(&session->connection, stream_id, &session->answer_head);
    call->has_answer = true;
    return call;
}

static void write_prefix(uint8_t *prefix, size_t length) {
    const uint8_t written[PREFIX_BYTES] = {0, (uint8_t)(length >> 24), (uint8_t)(length >> 16),
                                           (uint8_t)(length >> 8), (uint8_t)length};
    memcpy(prefix, written, sizeof written);
}

static int64_t queued_of(Session *session, Stream *call, bool is_kept) {
    if (is_kept) return (int64_t)stream_queued(call);
    forget_call(session, call);
    return -1;
}

int64_t session_answer(Session *session, uint32_t stream_id, const uint8_t *message,
                       size_t length) {
    Connection *connection = &session->connection;
    Stream *call = begin_answer(session, stream_id, length);
    if (!call) return -1;
    uint8_t prefix[PREFIX_BYTES];
    write_prefix(prefix, length);
    return queued_of(session, call, connection_send(connection, stream_id, prefix, sizeof prefix,
                                                    message, length));
}

int64_t session_lend(Session *session, uint32_t stream_id, Text before, Loan loan, Text behind) {
    size_t length = before.length + loan.bytes.length + behind.length;
    Stream *call = begin_answer(session, stream_id, length);
    if (!call) {
        loan_end(&loan);
        return -1;
    }
    Buffer *block = &session->block;
    uint8_t prefix[PREFIX_BYTES];
    write_prefix(prefix, length);
    buffer_clear(block);
    buffer_add(block, prefix, sizeof prefix);
    buffer_add(block, before.bytes, before.length);
    session->connection.is_broken |= block->is_broken;
    Text begun = {buffer_content(block), buffer_length(block)};
    return queued_of(session, call,
                     connection_lend(&session->connection, stream_id, begun, loan, behind));
}

/* Adds a status (grpc/grpc, doc/PROTOCOL-HTTP2.md): "%", and all except printable ASCII, as %XX. */
static void add_status(Session *session, int status, const uint8_t *text, size_t length) {
    static const char DIGITS[] = "0123456789ABCDEF";
    Buffer message = {0};
    const uint8_t code[] = {(uint8_t)('0' + status / 10), (uint8_t)('0' + status % 10)};
    bool is_short = status < 10;
    hpack_encode(&session->block, "grpc-status", code + is_short, 2u - is_short);
    for (size_t n = 0; n < length; n++) {
        uint8_t byte = text[n];
        const uint8_t escape[] = {'%', (uint8_t)DIGITS[byte >> 4], (uint8_t)DIGITS[byte & 15]};
        bool is_plain = byte >= 0x20 && byte <= 0x7e && byte != '%';
        buffer_add(&message, is_plain ? &text[n] : escape, is_plain ? 1 : sizeof escape);
    }
    if (length)
        hpack_encode(&session->block, "grpc-message", message.bytes, buffer_length(&message));
    session->connection.is_broken |= session->block.is_broken || message.is_broken;
    buffer_free(&message);
}

void session_finish(Session *session, uint32_t stream_id, int status, const uint8_t *text,
                    size_t length) {
    Stream *call = find_call(session, stream_id);
    if (!call) return;
    bool is_usual = status == OK && call->has_answer;
    if (is_usual) {
        connection_end(&session->connection, stream_id, &session->ok_trailers, false);
    } else {
        Buffer *block = &session->block, *head = &session->answer_head;
        buffer_clear(block);
        if (!call->has_answer) buffer_add(block, head->bytes, buffer_length(head));
        add_status(session, status, text, length);
        connection_end(&session->connection, stream_id, block, true);
    }
    forget_call(session, call);
}

int64_t session_queued(const Session *session, uint32_t stream_id) {
    const Stream *call = find_call(session, stream_id);
    return call ? (int64_t)stream_queued(call) : 0;
}

void session_hold(Session *session, uint32_t stream_id) {
    Stream *call = find_call(session, stream_id);
    if (call) call->is_held = true;
}

void session_unhold(Session *session, uint32_t stream_id) {
    Stream *call = find_call(session, stream_id);
    if (!call) return;
    call->is_held = false;
    connection_consume(&session->connection, call, call->withheld);
    call->withheld = 0;
}

void session_close(Session *session) {
    connection_close(&session->connection);
}
