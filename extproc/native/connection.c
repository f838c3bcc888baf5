#include "frames.h"
#include "outbox.h"

#include <stddef.h>

#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define PREFACE_BYTES (sizeof PREFACE - 1)
#define SETTING_BYTES 6u
#define PING_BYTES 8u
#define GOAWAY_LEAST_BYTES 8u
#define PRIORITY_BYTES 5u
#define MAX_CACHED_BLOCK_BYTES 1024u

/* A frame, or a part of a DATA frame that arrives in parts. */
typedef struct {
    uint8_t kind, flags;
    uint32_t stream_id;
    Text payload;
} Frame;

static uint32_t get32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Notes the first fault, which ends the connection. */
static void fail(Connection *connection, uint32_t code, const char *text) {
    if (connection->has_failed) return;
    connection->has_failed = true;
    connection->fault_code = (int32_t)code;
    connection->fault_text = text;
}

static void say_goodbye_if_failed(Connection *connection, bool had_failed) {
    if (connection->has_failed && !had_failed)
        outbox_goaway(connection, (uint32_t)connection->fault_code, connection->fault_text);
}

static void count_down(Connection *connection, int64_t *left, const char *text) {
    if (--*left < 0) fail(connection, ENHANCE_YOUR_CALM, text);
}

static void count_idle(Connection *connection) {
    count_down(connection, &connection->idle_frames, "too many frames without progress");
}

static void reset_counts(Connection *connection) {
    const Limits *limits = &connection->limits;
    connection->pings = limits->pings_a_tick;
    connection->settings = limits->settings_a_tick;
    connection->idle_frames = limits->idle_frames_a_tick;
    connection->rapid_resets = limits->rapid_resets_a_tick;
    connection->faults = limits->faults_a_tick;
}

static void greet(Connection *connection) {
    const Limits *limits = &connection->limits;
    const struct {
        uint16_t name;
        int64_t value;
    } ours[] = {{SETTING_TABLE_SIZE, 0},
                {SETTING_MAX_STREAMS, limits->max_streams},
                {SETTING_INITIAL_WINDOW, limits->stream_window_bytes},
                {SETTING_MAX_HEADER_LIST, limits->max_header_list_bytes}};
    uint8_t payload[sizeof ours / sizeof *ours * SETTING_BYTES];
    for (size_t n = 0; n < sizeof ours / sizeof *ours; n++) {
        uint8_t *at = payload + n * SETTING_BYTES;
        uint32_t value = (uint32_t)ours[n].value;
        uint8_t setting[SETTING_BYTES] = {(uint8_t)(ours[n].name >> 8), (uint8_t)ours[n].name,
                                          (uint8_t)(value >> 24), (uint8_t)(value >> 16),
                                          (uint8_t)(value >> 8), (uint8_t)value};
        memcpy(at, setting, sizeof setting);
    }
    outbox_frame(connection, FRAME_SETTINGS, 0, 0, payload, sizeof payload);
    outbox_number(connection, FRAME_WINDOW_UPDATE, 0,
                  (uint32_t)(limits->connection_window_bytes - DEFAULT_WINDOW));
}

void connection_init(Connection *connection, const Limits *limits, Amount *budget) {
    *connection = (Connection){.limits = *limits, .budget = budget};
    hpack_init(&connection->hpack, (size_t)limits->max_header_list_bytes);
    connection->window = limits->connection_window_bytes;
    connection->out_window = connection->out_initial = DEFAULT_WINDOW;
    connection->waiting.offset = offsetof(Stream, waiting);
    connection->ready.offset = offsetof(Stream, ready);
    connection->called.offset = offsetof(Stream, called);
    reset_counts(connection);
    greet(connection);
}

void connection_free(Connection *connection) {
    table_free(&connection->streams);
    hpack_free(&connection->hpack);
    buffer_free(&connection->unread);
    buffer_free(&connection->block);
    buffer_free(&connection->texts);
    buffer_free(&connection->cached_block);
    buffer_free(&connection->cached_texts);
    buffer_free(&connection->out);
    free(connection->events.items);
    connection->events = (FrameEvents){0};
}

static FrameEvent *add_event(Connection *connection, FrameEventKind kind, uint32_t stream_id) {
    FrameEvents *events = &connection->events;
    if (events->count == events->room) {
        size_t room = events->room ? events->room * 2 : 16;
        FrameEvent *items = realloc(events->items, room * sizeof *items);
        if (!items) {
            connection->is_broken = true;
            return NULL;
        }
        events->items = items;
        events->room = room;
    }
    FrameEvent *event = &events->items[events->count++];
    *event = (FrameEvent){.kind = kind, .stream_id = stream_id};
    return event;
}

/* --- streams --- */

static Stream *open_stream(const Connection *connection, uint32_t stream_id) {
    Stream *stream = connection_find(connection, stream_id);
    return stream && stream->is_open ? stream : NULL;
}

static bool was_reset(const Connection *connection, uint32_t stream_id) {
    for (uint32_t n = 0; n < connection->reset_count; n++)
        if (connection->reset_ids[n] == stream_id) return true;
    return false;
}

/* Remembers a stream on which frames may still arrive. */
static void remember(Connection *connection, uint32_t stream_id) {
    if (was_reset(connection, stream_id)) return;
    connection->reset_ids[connection->reset_next] = stream_id;
    connection->reset_next = (connection->reset_next + 1) % MAX_RESET_KEPT;
    if (connection->reset_count < MAX_RESET_KEPT) connection->reset_count++;
}

static void close_stream(Connection *connection, Stream *stream) {
    outbox_forget(connection, stream);
    stream->is_open = false;
    connection->open_count--;
    connection_release(connection, stream);
}

void connection_finish(Connection *connection, Stream *stream) {
    if (!stream->is_received) remember(connection, stream->id);
    close_stream(connection, stream);
}

static void say_reset(Connection *connection, uint32_t stream_id, uint32_t code) {
    outbox_number(connection, FRAME_RST_STREAM, stream_id, code);
    remember(connection, stream_id);
}

static void reset_stream(Connection *connection, Stream *stream, uint32_t code) {
    uint32_t stream_id = stream->id;
    close_stream(connection, stream);
    say_reset(connection, stream_id, code);
}

/* Answers a stream error with RST_STREAM (RFC 9113, section 5.4.2). */
static void refuse(Connection *connection, uint32_t stream_id, uint32_t code) {
    count_down(connection, &connection->faults, "too many stream errors");
    if (connection->has_failed) return;
    Stream *stream = open_stream(connection, stream_id);
    if (stream) {
        reset_stream(connection, stream, code);
        add_event(connection, ABORTED, stream_id);
    } else {
        say_reset(connection, stream_id, code);
    }
}

/* Checks that a stream is not idle: an idle one may get only HEADERS and PRIORITY. */
static bool is_known(Connection *connection, uint32_t stream_id, const char *text) {
    if (stream_id && stream_id <= connection->last_id && stream_id % 2) return true;
    fail(connection, PROTOCOL_ERROR, text);
    return false;
}

void connection_consume(Connection *connection, Stream *stream, int64_t size) {
    if (!stream->is_open || stream->is_received) return;
    stream->unreturned += size;
    if (stream->unreturned * 2 < connection->limits.stream_window_bytes) return;
    stream->window += stream->unreturned;
    outbox_number(connection, FRAME_WINDOW_UPDATE, stream->id, (uint32_t)stream->unreturned);
    stream->unreturned = 0;
}

static void deliver(Connection *connection, Stream *stream, Text bytes, bool is_last) {
    if (is_last) {
        if (stream->has_expected && stream->expected != stream->received) {
            refuse(connection, stream->id, PROTOCOL_ERROR);
            return;
        }
        stream->is_received = true;
    }
    if (stream->has_trailers) {
        connection_consume(connection, stream, (int64_t)bytes.length);
        return;
    }
    FrameEvent *event = add_event(connection, RECEIVED, stream->id);
    if (!event) return;
    event->bytes = bytes;
    event->is_last = is_last;
}

/* Gives the used part of the connection's window back to the peer. */
static bool return_window(Connection *connection, int64_t size) {
    connection->window -= size;
    connection->unreturned += size;
    if (connection->window < 0) {
        fail(connection, FLOW_CONTROL_ERROR, "more DATA than the connection allows");
        return false;
    }
    if (connection->unreturned < connection->limits.connection_window_bytes / 2) return true;
    connection->window += connection->unreturned;
    outbox_number(connection, FRAME_WINDOW_UPDATE, 0, (uint32_t)connection->unreturned);
    connection->unreturned = 0;
    return true;
}

/* RFC 9113, section 6.1. */
static bool remove_padding(Connection *connection, Text *payload) {
    if (!payload->length) {
        fail(connection, FRAME_SIZE_ERROR, "padded frame without a length of padding");
        return false;
    }
    size_t padding = payload->bytes[0];
    if (padding >= payload->length) {
        fail(connection, PROTOCOL_ERROR, "more padding than payload");
        return false;
    }
    *payload = (Text){payload->bytes + 1, payload->length - 1 - padding};
    return true;
}

static void receive_late_data(Connection *connection, uint32_t stream_id) {
    if (!is_known(connection, stream_id, "DATA on no stream")) return;
    count_idle(connection);
    if (!connection->has_failed && !was_reset(connection, stream_id))
        refuse(connection, stream_id, STREAM_CLOSED);
}

static void receive_data(Connection *connection, const Frame *frame) {
    Text payload = frame->payload;
    int64_t size = (int64_t)payload.length;
    if (!return_window(connection, size)) return;
    if (frame->flags & FLAG_PADDED && !remove_padding(connection, &payload)) return;
    Stream *stream = open_stream(connection, frame->stream_id);
    if (!stream || stream->is_received) {
        receive_late_data(connection, frame->stream_id);
        return;
    }
    stream->window -= size;
    if (stream->window < 0) {
        refuse(connection, stream->id, FLOW_CONTROL_ERROR);
        return;
    }
    if (frame->flags & FLAG_PADDED)
        connection_consume(connection, stream, size - (int64_t)payload.length);
    bool is_last = frame->flags & FLAG_END_STREAM;
    if (payload.length) {
        stream->is_used = true;
        stream->received += payload.length;
    } else if (!is_last) {
        count_idle(connection);
        return;
    }
    deliver(connection, stream, payload, is_last);
}

static void open_request(Connection *connection, uint32_t stream_id, const Head *head,
                         bool is_last) {
    if (connection->is_draining || connection->open_count >= connection->limits.max_streams) {
        count_idle(connection);
        if (!connection->has_failed) say_reset(connection, stream_id, REFUSED_STREAM);
        return;
    }
    bool has_no_body = is_last && head->has_length && head->content_length;
    if (head->is_malformed || !head->is_request || has_no_body) {
        refuse(connection, stream_id, PROTOCOL_ERROR);
        return;
    }
    connection->idle_frames += connection->limits.idle_frames_a_stream;
    Stream *stream = table_add(&connection->streams, stream_id);
    FrameEvent *event = stream ? add_event(connection, OPENED, stream_id) : NULL;
    if (!event) {
        connection->is_broken = true;
        return;
    }
    stream->is_open = stream->has_call = true; /* until the session has taken the event */
    stream->window = connection->limits.stream_window_bytes;
    stream->has_expected = head->has_length;
    stream->expected = head->content_length;
    stream->is_received = event->is_last = is_last;
    event->head = *head;
    connection->open_count++;
}

static void receive_trailers(Connection *connection, Stream *stream, const Head *head,
                             bool is_last) {
    if (stream->is_received)
        refuse(connection, stream->id, STREAM_CLOSED);
    else if (head->is_malformed || !is_last || !head->is_trailers)
        refuse(connection, stream->id, PROTOCOL_ERROR);
    else
        deliver(connection, stream, (Text){0}, true);
}

static void receive_head(Connection *connection, uint32_t stream_id, const Head *head,
                         bool is_last) {
    Stream *stream = open_stream(connection, stream_id);
    if (stream) {
        receive_trailers(connection, stream, head, is_last);
    } else if (stream_id % 2 == 0) {
        fail(connection, PROTOCOL_ERROR, "a client's streams have odd numbers");
    } else if (stream_id > connection->last_id) {
        connection->last_id = stream_id;
        open_request(connection, stream_id, head, is_last);
    } else if (was_reset(connection, stream_id)) {
        count_idle(connection);
    } else {
        fail(connection, STREAM_CLOSED, "HEADERS on a closed stream");
    }
}

/* --- header blocks --- */

/* Copies a text of a head behind what is in `texts`; returns where. */
static size_t copy_text(const Head *head, size_t at, size_t length, Buffer *texts) {
    size_t copied_at = buffer_length(texts);
    if (length) buffer_add(texts, head->texts->bytes + at, length);
    return copied_at;
}

/* Returns a head with copies of its texts, in another buffer than theirs. */
static Head copy_head(const Head *head, Buffer *texts) {
    Head copy = *head;
    copy.path_at = copy_text(head, head->path_at, head->path_length, texts);
    copy.trace_at = copy_text(head, head->trace_at, head->trace_length, texts);
    copy.texts = texts;
    return copy;
}

static void keep_block(Connection *connection, Text block, const Head *head) {
    buffer_clear(&connection->cached_block);
    buffer_clear(&connection->cached_texts);
    buffer_add(&connection->cached_block, block.bytes, block.length);
    connection->cached_head = copy_head(head, &connection->cached_texts);
    connection->is_broken |=
        connection->cached_block.is_broken || connection->cached_texts.is_broken;
}

/* Decodes a block; one without state that equals the last such block is not decoded again. Its
 * texts are in `texts` either way: another block of this read may take that one's place. */
static bool decode_block(Connection *connection, Text block, Head *head) {
    Buffer *cached = &connection->cached_block;
    bool may_keep = block.length <= MAX_CACHED_BLOCK_BYTES &&
                    hpack_is_stateless(&connection->hpack, block.bytes, block.length);
    if (may_keep && buffer_length(cached) == block.length &&
        !memcmp(buffer_content(cached), block.bytes, block.length)) {
        *head = copy_head(&connection->cached_head, &connection->texts);
        connection->is_broken |= connection->texts.is_broken;
        return !connection->is_broken;
    }
    head_begin(head, &connection->texts);
    HpackResult result =
        hpack_decode(&connection->hpack, block.bytes, block.length, head_take, head);
    head_end(head);
    connection->is_broken |= connection->texts.is_broken;
    if (result == HPACK_TOO_LARGE)
        fail(connection, ENHANCE_YOUR_CALM, "header list too large");
    else if (result == HPACK_TOO_MANY_SIZES)
        fail(connection, COMPRESSION_ERROR, "too many table sizes");
    else if (result != HPACK_DONE)
        fail(connection, COMPRESSION_ERROR, "undecodable header block");
    if (result != HPACK_DONE || connection->is_broken) return false;
    if (may_keep) keep_block(connection, block, head);
    return !connection->is_broken;
}

static void take_block(Connection *connection, uint32_t stream_id, Text block, bool is_last) {
    Head head;
    if (decode_block(connection, block, &head))
        receive_head(connection, stream_id, &head, is_last);
}

/* Adds to a block that came in several frames, and takes it if it is complete. */
static void join_block(Connection *connection, uint8_t flags, Text part) {
    Buffer *block = &connection->block;
    size_t length = buffer_length(block) + part.length;
    if (length > (size_t)connection->limits.max_header_block_bytes) {
        fail(connection, ENHANCE_YOUR_CALM, "header block too large");
        return;
    }
    buffer_add(block, part.bytes, part.length);
    connection->is_broken |= block->is_broken;
    if (!(flags & FLAG_END_HEADERS) || connection->is_broken) return;
    connection->is_joining = false;
    take_block(connection, connection->joined_stream, (Text){buffer_content(block), length},
               connection->joins_last);
    buffer_free(block);
}

static void receive_headers(Connection *connection, const Frame *frame) {
    Text payload = frame->payload;
    if (!frame->stream_id) {
        fail(connection, PROTOCOL_ERROR, "HEADERS on no stream");
        return;
    }
    if (frame->flags & FLAG_PADDED && !remove_padding(connection, &payload)) return;
    if (frame->flags & FLAG_PRIORITY) {
        if (payload.length < PRIORITY_BYTES) {
            fail(connection, FRAME_SIZE_ERROR, "HEADERS too short");
            return;
        }
        payload = (Text){payload.bytes + PRIORITY_BYTES, payload.length - PRIORITY_BYTES};
    }
    connection->joined_stream = frame->stream_id;
    connection->joins_last = frame->flags & FLAG_END_STREAM;
    connection->continuations = 0;
    connection->is_joining = true;
    join_block(connection, frame->flags, payload);
}

static void receive_continuation(Connection *connection, const Frame *frame) {
    if (frame->kind != FRAME_CONTINUATION || !connection->is_joining ||
        frame->stream_id != connection->joined_stream) {
        fail(connection, PROTOCOL_ERROR, "CONTINUATION and nothing else follows");
    } else if (++connection->continuations > connection->limits.max_continuations) {
        fail(connection, ENHANCE_YOUR_CALM, "too many CONTINUATION");
    } else {
        join_block(connection, frame->flags, frame->payload);
    }
}

/* --- other frames --- */

static void receive_reset(Connection *connection, const Frame *frame) {
    if (frame->payload.length != 4) {
        fail(connection, FRAME_SIZE_ERROR, "RST_STREAM of a wrong length");
        return;
    }
    if (!is_known(connection, frame->stream_id, "RST_STREAM on no stream")) return;
    Stream *stream = open_stream(connection, frame->stream_id);
    if (!stream) {
        count_idle(connection);
        return;
    }
    bool was_used = stream->is_used;
    close_stream(connection, stream);
    add_event(connection, ABORTED, frame->stream_id);
    if (!was_used)
        count_down(connection, &connection->rapid_resets, "too many streams reset at once");
}

static void receive_window_update(Connection *connection, const Frame *frame) {
    if (frame->payload.length != 4) {
        fail(connection, FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong length");
        return;
    }
    count_idle(connection);
    if (connection->has_failed) return;
    uint32_t increment = get32(frame->payload.bytes) & MAX_WINDOW;
    if (!frame->stream_id) {
        connection->out_window += increment;
        if (!increment)
            fail(connection, PROTOCOL_ERROR, "WINDOW_UPDATE of nothing");
        else if (connection->out_window > MAX_WINDOW)
            fail(connection, FLOW_CONTROL_ERROR, "window too large");
        return;
    }
    if (!is_known(connection, frame->stream_id, "WINDOW_UPDATE on no stream")) return;
    Stream *stream = open_stream(connection, frame->stream_id);
    if (!increment)
        refuse(connection, frame->stream_id, PROTOCOL_ERROR);
    else if (stream && !outbox_grant(connection, stream, increment))
        refuse(connection, stream->id, FLOW_CONTROL_ERROR);
}

/* Ignores PRIORITY, on idle and closed streams too (RFC 9113, section 5.3.2). */
static void receive_priority(Connection *connection, const Frame *frame) {
    if (!frame->stream_id) {
        fail(connection, PROTOCOL_ERROR, "PRIORITY on no stream");
        return;
    }
    count_idle(connection);
    if (connection->has_failed) return;
    if (frame->payload.length != PRIORITY_BYTES && frame->stream_id <= connection->last_id)
        refuse(connection, frame->stream_id, FRAME_SIZE_ERROR);
}

/* The peer's initial window changes each stream's window, and may make none too large. */
static void set_initial_window(Connection *connection, uint32_t size) {
    const StreamTable *table = &connection->streams;
    bool has_one = false;
    int64_t most = 0;
    for (size_t at = 0; at < table->capacity; at++) {
        const Stream *stream = table->slots[at];
        if (!stream || !stream->is_open) continue;
        if (!has_one || stream->credit > most) most = stream->credit;
        has_one = true;
    }
    if (size + most > MAX_WINDOW)
        fail(connection, FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large");
    else
        outbox_set_initial_window(connection, size);
}

/* Checks a setting (RFC 9113, 6.5.2). The server uses no dynamic table, and does not push. */
static bool is_setting(Connection *connection, uint32_t name, uint32_t value) {
    if (name == SETTING_ENABLE_PUSH && value > 1)
        fail(connection, PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1");
    else if (name == SETTING_INITIAL_WINDOW && value > MAX_WINDOW)
        fail(connection, FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large");
    else if (name == SETTING_MAX_FRAME &&
             (value < MAX_FRAME_BYTES || value > LARGEST_MAX_FRAME_BYTES))
        fail(connection, PROTOCOL_ERROR, "MAX_FRAME_SIZE out of bounds");
    return !connection->has_failed;
}

static void receive_settings_ack(Connection *connection, Text payload) {
    if (payload.length) {
        fail(connection, FRAME_SIZE_ERROR, "SETTINGS ACK with a payload");
    } else if (!connection->is_acknowledged) {
        connection->is_acknowledged = true;
        hpack_forbid_table(&connection->hpack);
    }
}

static void receive_settings(Connection *connection, const Frame *frame) {
    Text payload = frame->payload;
    count_down(connection, &connection->settings, "too many SETTINGS");
    if (connection->has_failed) return;
    if (frame->flags & FLAG_ACK) {
        receive_settings_ack(connection, payload);
        return;
    }
    if (payload.length % SETTING_BYTES) {
        fail(connection, FRAME_SIZE_ERROR, "SETTINGS of a wrong length");
        return;
    }
    bool has_window = false;
    uint32_t window = 0;
    for (size_t at = 0; at < payload.length; at += SETTING_BYTES) {
        const uint8_t *setting = payload.bytes + at;
        uint32_t name = (uint32_t)setting[0] << 8 | setting[1], value = get32(setting + 2);
        if (!is_setting(connection, name, value)) return;
        if (name != SETTING_INITIAL_WINDOW) continue;
        has_window = true;
        window = value;
    }
    if (has_window) set_initial_window(connection, window); /* once, though set many times */
    if (connection->has_failed) return;
    connection->is_greeted = true;
    outbox_frame(connection, FRAME_SETTINGS, FLAG_ACK, 0, NULL, 0);
}

static void receive_ping(Connection *connection, const Frame *frame) {
    if (frame->payload.length != PING_BYTES) {
        fail(connection, FRAME_SIZE_ERROR, "PING of a wrong length");
        return;
    }
    count_down(connection, &connection->pings, "too many PING");
    if (!connection->has_failed && !(frame->flags & FLAG_ACK))
        outbox_frame(connection, FRAME_PING, FLAG_ACK, 0, frame->payload.bytes, PING_BYTES);
}

/* Takes a frame that belongs to no stream. */
static void receive_control(Connection *connection, const Frame *frame) {
    bool is_control = frame->kind == FRAME_SETTINGS || frame->kind == FRAME_PING ||
                      frame->kind == FRAME_GOAWAY;
    if (frame->kind == FRAME_PUSH_PROMISE) {
        fail(connection, PROTOCOL_ERROR, "a client cannot promise");
    } else if (!is_control) {
        count_idle(connection);
    } else if (frame->stream_id) {
        fail(connection, PROTOCOL_ERROR, "control frame on a stream");
    } else if (frame->kind == FRAME_SETTINGS) {
        receive_settings(connection, frame);
    } else if (frame->kind == FRAME_PING) {
        receive_ping(connection, frame);
    } else if (frame->payload.length < GOAWAY_LEAST_BYTES) {
        fail(connection, FRAME_SIZE_ERROR, "GOAWAY too short");
    } else {
        count_idle(connection);
        if (!connection->has_failed) connection->has_said_goodbye = true;
    }
}

static void receive_frame(Connection *connection, const Frame *frame) {
    bool is_greeting = frame->kind == FRAME_SETTINGS && !(frame->flags & FLAG_ACK);
    bool is_whole = frame->kind == FRAME_HEADERS &&
                    (frame->flags & ~FLAG_END_STREAM) == FLAG_END_HEADERS &&
                    frame->payload.length <= (size_t)connection->limits.max_header_block_bytes;
    if (connection->is_joining || frame->kind == FRAME_CONTINUATION)
        receive_continuation(connection, frame);
    else if (!connection->is_greeted && !is_greeting)
        fail(connection, PROTOCOL_ERROR, "the first frame is not SETTINGS");
    else if (frame->kind == FRAME_DATA)
        receive_data(connection, frame);
    else if (is_whole)
        take_block(connection, frame->stream_id, frame->payload, frame->flags & FLAG_END_STREAM);
    else if (frame->kind == FRAME_HEADERS)
        receive_headers(connection, frame);
    else if (frame->kind == FRAME_RST_STREAM)
        receive_reset(connection, frame);
    else if (frame->kind == FRAME_WINDOW_UPDATE)
        receive_window_update(connection, frame);
    else if (frame->kind == FRAME_PRIORITY)
        receive_priority(connection, frame);
    else
        receive_control(connection, frame);
}

/* --- reading --- */

/* Takes the next part of a DATA frame; returns how many bytes it took. */
static size_t receive_part(Connection *connection, const uint8_t *data, size_t length) {
    size_t missing = (size_t)connection->data_missing;
    size_t taken = length < missing ? length : missing;
    if (!taken) return 0;
    connection->data_missing -= (int64_t)taken;
    uint8_t flags = connection->data_flags;
    if (connection->data_missing) flags &= (uint8_t)~FLAG_END_STREAM;
    receive_frame(connection,
                  &(Frame){FRAME_DATA, flags, connection->data_stream, {data, taken}});
    return taken;
}

/* Takes the frame that begins here; returns how many bytes it took, 0 if it is incomplete. */
static size_t receive_next(Connection *connection, const uint8_t *data, size_t length) {
    if (length < HEADER_BYTES) return 0;
    size_t size = (size_t)data[0] << 16 | (size_t)data[1] << 8 | data[2];
    Frame frame = {data[3], data[4], get32(data + 5) & STREAM_MASK, {data + HEADER_BYTES, size}};
    if (size > MAX_FRAME_BYTES) {
        fail(connection, FRAME_SIZE_ERROR, "frame too long");
        return 0;
    }
    if (length - HEADER_BYTES >= size) {
        receive_frame(connection, &frame);
        return HEADER_BYTES + size;
    }
    if (frame.kind != FRAME_DATA || frame.flags & FLAG_PADDED) return 0;
    connection->data_missing = (int64_t)size;
    connection->data_flags = frame.flags;
    connection->data_stream = frame.stream_id;
    return HEADER_BYTES +
           receive_part(connection, data + HEADER_BYTES, length - HEADER_BYTES);
}

static size_t receive_preface(Connection *connection, const uint8_t *data, size_t length) {
    size_t missing = PREFACE_BYTES - connection->preface_length;
    size_t taken = length < missing ? length : missing;
    if (memcmp(data, PREFACE + connection->preface_length, taken))
        fail(connection, PROTOCOL_ERROR, "no HTTP/2 preface");
    connection->preface_length += taken;
    return taken;
}

static size_t receive_all(Connection *connection, const uint8_t *data, size_t length) {
    size_t at = receive_preface(connection, data, length);
    if (!connection->has_failed && connection->data_missing)
        at += receive_part(connection, data + at, length - at);
    while (!connection->has_failed && !connection->is_broken) {
        size_t taken = receive_next(connection, data + at, length - at);
        if (!taken) break;
        at += taken;
    }
    return at;
}

void connection_receive(Connection *connection, const uint8_t *data, size_t length) {
    if (connection->has_failed || connection->is_broken || !length) return;
    Buffer *unread = &connection->unread;
    bool continues = buffer_length(unread) > 0;
    if (continues) {
        buffer_add(unread, data, length);
        data = buffer_content(unread);
        length = buffer_length(unread);
    }
    size_t taken = unread->is_broken ? length : receive_all(connection, data, length);
    if (continues)
        unread->start += taken; /* its bytes stay where they are: events refer to them */
    else
        buffer_add(unread, data + taken, length - taken);
    connection->is_broken |= unread->is_broken || connection->out.is_broken;
    say_goodbye_if_failed(connection, false);
}

void connection_forget_read(Connection *connection) {
    connection->events.count = 0;
    buffer_clear(&connection->texts);
    buffer_shrink(&connection->unread);
    connection->is_broken |= connection->unread.is_broken;
}

/* --- sending --- */

bool connection_send(Connection *connection, uint32_t stream_id, const uint8_t *prefix,
                     size_t prefix_length, const uint8_t *data, size_t length) {
    Stream *stream = open_stream(connection, stream_id);
    if (!stream) return false;
    if (outbox_send(connection, stream, prefix, prefix_length, data, length)) return true;
    reset_stream(connection, stream, ENHANCE_YOUR_CALM);
    return false;
}

bool connection_lend(Connection *connection, uint32_t stream_id, Text before, Loan loan,
                     Text behind) {
    Stream *stream = open_stream(connection, stream_id);
    if (stream && outbox_lend(connection, stream, before, loan, behind)) return true;
    loan_end(&loan);
    if (stream) reset_stream(connection, stream, ENHANCE_YOUR_CALM);
    return false;
}

void connection_send_head(Connection *connection, uint32_t stream_id, const Buffer *block) {
    if (open_stream(connection, stream_id))
        outbox_frame(connection, FRAME_HEADERS, FLAG_END_HEADERS, stream_id,
                     buffer_content(block), buffer_length(block));
}

void connection_end(Connection *connection, uint32_t stream_id, const Buffer *block, bool is_due) {
    Stream *stream = open_stream(connection, stream_id);
    if (!stream) return;
    stream->has_trailers = true;
    buffer_add(&stream->trailers, buffer_content(block), buffer_length(block));
    connection->is_broken |= stream->trailers.is_broken;
    connection->is_due |= is_due || !stream->is_received;
    if (outbox_end(connection, stream)) connection_finish(connection, stream);
}

void connection_reset(Connection *connection, uint32_t stream_id, uint32_t code) {
    Stream *stream = open_stream(connection, stream_id);
    if (stream) reset_stream(connection, stream, code);
}

void connection_drain(Connection *connection) {
    if (connection->is_draining || connection->has_failed) return;
    connection->is_draining = true;
    outbox_goaway(connection, ERROR_NONE, "");
}

bool connection_is_over(const Connection *connection) {
    return !connection->open_count && (connection->is_draining || connection->has_said_goodbye);
}

void connection_close(Connection *connection) {
    const StreamTable *table = &connection->streams;
    for (size_t at = 0; at < table->capacity; at++) {
        const Stream *stream = table->slots[at];
        if (!stream) continue;
        int64_t kept = (int64_t)stream_queued(stream) + stream->charged + stream->refused_bytes;
        amount_give_back(connection->budget, kept);
    }
    table_free(&connection->streams);
    connection->open_count = 0;
    connection->waiting.first = connection->waiting.last = NULL;
    connection->ready.first = connection->ready.last = NULL;
    connection->called.first = connection->called.last = NULL;
}

static void reset_stalled(Connection *connection) {
    Stream *next;
    for (Stream *stream = connection->waiting.first; stream; stream = next) {
        next = list_next(&connection->waiting, stream);
        if (++stream->stalled_ticks <= connection->limits.stall_ticks) continue;
        uint32_t stream_id = stream->id;
        reset_stream(connection, stream, CANCEL);
        add_event(connection, ABORTED, stream_id);
    }
}

void connection_tick(Connection *connection) {
    bool had_failed = connection->has_failed;
    reset_counts(connection);
    connection->ticks++;
    if (connection->is_greeted || connection->ticks <= connection->limits.preface_ticks)
        reset_stalled(connection);
    else
        fail(connection, SETTINGS_TIMEOUT, "no preface in time");
    say_goodbye_if_failed(connection, had_failed);
}
