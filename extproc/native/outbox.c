/* Queues data to send: whole frames at once, DATA as the peer's windows allow (RFC 9113, 5.2). */
#include "frames.h"
#include "outbox.h"

/* Most bytes of waiting DATA to send at a time; then the transport shows whether it has more room. */
#define MAX_PUMPED_BYTES (256 * 1024)

static void put32(uint8_t *at, uint32_t number) {
    at[0] = (uint8_t)(number >> 24);
    at[1] = (uint8_t)(number >> 16);
    at[2] = (uint8_t)(number >> 8);
    at[3] = (uint8_t)number;
}

static void put_header(Buffer *out, size_t length, uint8_t kind, uint8_t flags, uint32_t stream_id) {
    uint8_t header[HEADER_BYTES] = {(uint8_t)(length >> 16), (uint8_t)(length >> 8),
                                    (uint8_t)length, kind, flags};
    put32(header + 5, stream_id);
    buffer_add(out, header, sizeof header);
}

void outbox_frame(Connection *connection, uint8_t kind, uint8_t flags, uint32_t stream_id,
                  const uint8_t *payload, size_t length) {
    connection->is_due = true;
    put_header(&connection->out, length, kind, flags, stream_id);
    buffer_add(&connection->out, payload, length);
}

void outbox_number(Connection *connection, uint8_t kind, uint32_t stream_id, uint32_t number) {
    uint8_t payload[4];
    put32(payload, number);
    outbox_frame(connection, kind, 0, stream_id, payload, sizeof payload);
}

void outbox_goaway(Connection *connection, uint32_t code, const char *text) {
    uint8_t head[8];
    if (!connection->has_last_taken) {
        connection->has_last_taken = true;
        connection->last_taken = connection->last_id;
    }
    put32(head, connection->last_taken);
    put32(head + 4, code);
    connection->is_due = true;
    put_header(&connection->out, sizeof head + strlen(text), FRAME_GOAWAY, 0, 0);
    buffer_add(&connection->out, head, sizeof head);
    buffer_add(&connection->out, text, strlen(text));
}

static int64_t stream_room(const Connection *connection, const Stream *stream) {
    return connection->out_initial + stream->credit;
}

static void keep(Connection *connection, Stream *stream, const uint8_t *bytes, size_t length) {
    buffer_add(&stream->queue, bytes, length);
    connection->is_broken |= stream->queue.is_broken;
}

bool outbox_send(Connection *connection, Stream *stream, const uint8_t *prefix,
                 size_t prefix_length, const uint8_t *data, size_t length) {
    int64_t size = (int64_t)(prefix_length + length);
    bool fits = size <= connection->out_window && size <= stream_room(connection, stream) &&
                size <= (int64_t)MAX_FRAME_BYTES;
    if (fits && !buffer_length(&stream->queue) && !connection->is_paused) {
        connection->out_window -= size;
        stream->credit -= size;
        connection->is_due = true;
        put_header(&connection->out, (size_t)size, FRAME_DATA, 0, stream->id);
        buffer_add(&connection->out, prefix, prefix_length);
        buffer_add(&connection->out, data, length);
        return true;
    }
    if (!amount_take(connection->budget, size)) return false;
    keep(connection, stream, prefix, prefix_length);
    keep(connection, stream, data, length);
    list_add(&connection->waiting, stream);
    if (stream_room(connection, stream) > 0) list_add(&connection->ready, stream);
    return true;
}

void outbox_forget(Connection *connection, Stream *stream) {
    amount_give_back(connection->budget,
                     (int64_t)buffer_length(&stream->queue) + stream->refused_bytes);
    stream->refused_bytes = 0;
    buffer_free(&stream->queue);
    list_remove(&connection->waiting, stream);
    list_remove(&connection->ready, stream);
}

bool outbox_end(Connection *connection, Stream *stream) {
    if (buffer_length(&stream->queue) || !stream->has_trailers) return false;
    const Buffer *block = &stream->trailers;
    if (buffer_length(block))
        put_header(&connection->out, buffer_length(block), FRAME_HEADERS,
                   FLAG_END_HEADERS | FLAG_END_STREAM, stream->id);
    else
        put_header(&connection->out, 0, FRAME_DATA, FLAG_END_STREAM, stream->id);
    buffer_add(&connection->out, buffer_content(block), buffer_length(block));
    if (!stream->is_received) { /* RFC 9113, section 8.1: the rest of the request is not needed */
        uint8_t code[4] = {0};
        put_header(&connection->out, sizeof code, FRAME_RST_STREAM, 0, stream->id);
        buffer_add(&connection->out, code, sizeof code);
    }
    return true;
}

bool outbox_grant(Connection *connection, Stream *stream, uint32_t increment) {
    stream->credit += increment;
    if (stream_room(connection, stream) > MAX_WINDOW) return false;
    if (buffer_length(&stream->queue) && stream_room(connection, stream) > 0)
        list_add(&connection->ready, stream);
    return true;
}

void outbox_set_initial_window(Connection *connection, uint32_t size) {
    connection->out_initial = size;
    for (Stream *stream = connection->waiting.first; stream;
         stream = list_next(&connection->waiting, stream))
        if (stream_room(connection, stream) > 0) list_add(&connection->ready, stream);
}

/* Sends one frame of waiting DATA. */
static void send_queued(Connection *connection, Stream *stream) {
    int64_t size = (int64_t)buffer_length(&stream->queue);
    if (size > connection->out_window) size = connection->out_window;
    if (size > stream_room(connection, stream)) size = stream_room(connection, stream);
    if (size > (int64_t)MAX_FRAME_BYTES) size = MAX_FRAME_BYTES;
    put_header(&connection->out, (size_t)size, FRAME_DATA, 0, stream->id);
    buffer_add(&connection->out, buffer_content(&stream->queue), (size_t)size);
    buffer_drop(&stream->queue, (size_t)size);
    connection->pumped += size;
    connection->out_window -= size;
    stream->credit -= size;
    stream->stalled_ticks = 0;
    amount_give_back(connection->budget, size);
}

void connection_pump(Connection *connection) {
    while (connection->ready.first && connection->out_window > 0 &&
           connection->pumped < MAX_PUMPED_BYTES && !connection->is_paused) {
        Stream *stream = connection->ready.first;
        if (stream_room(connection, stream) > 0) send_queued(connection, stream);
        if (!buffer_length(&stream->queue)) {
            buffer_free(&stream->queue);
            list_remove(&connection->ready, stream);
            list_remove(&connection->waiting, stream);
            if (outbox_end(connection, stream)) connection_finish(connection, stream);
        } else if (stream_room(connection, stream) <= 0) {
            list_remove(&connection->ready, stream);
        }
    }
    if (buffer_length(&connection->out)) connection->pumped = 0;
}
