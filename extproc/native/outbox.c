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
    Buffer *last = stream->loan.owner ? &stream->behind : &stream->queue;
    buffer_add(last, bytes, length);
    connection->is_broken |= last->is_broken;
}

/* Lets a stream's DATA be sent as windows allow. */
static void await_room(Connection *connection, Stream *stream) {
    list_add(&connection->waiting, stream);
    if (stream_room(connection, stream) > 0) list_add(&connection->ready, stream);
}

/* Begins a frame that can be sent at once with so many bytes of DATA; false if it cannot. */
static bool begin_frame(Connection *connection, Stream *stream, int64_t size) {
    bool fits = size <= connection->out_window && size <= stream_room(connection, stream) &&
                size <= (int64_t)MAX_FRAME_BYTES;
    if (!fits || stream_queued(stream) || connection->is_paused) return false;
    connection->out_window -= size;
    stream->credit -= size;
    connection->is_due = true;
    put_header(&connection->out, (size_t)size, FRAME_DATA, 0, stream->id);
    return true;
}

bool outbox_send(Connection *connection, Stream *stream, const uint8_t *prefix,
                 size_t prefix_length, const uint8_t *data, size_t length) {
    int64_t size = (int64_t)(prefix_length + length);
    if (begin_frame(connection, stream, size)) {
        buffer_add(&connection->out, prefix, prefix_length);
        buffer_add(&connection->out, data, length);
        return true;
    }
    if (!amount_take(connection->budget, size)) return false;
    keep(connection, stream, prefix, prefix_length);
    keep(connection, stream, data, length);
    await_room(connection, stream);
    return true;
}

bool outbox_lend(Connection *connection, Stream *stream, Text before, Loan loan, Text behind) {
    int64_t size = (int64_t)(before.length + loan.bytes.length + behind.length);
    if (begin_frame(connection, stream, size)) {
        buffer_add(&connection->out, before.bytes, before.length);
        buffer_add(&connection->out, loan.bytes.bytes, loan.bytes.length);
        buffer_add(&connection->out, behind.bytes, behind.length);
        loan_end(&loan);
        return true;
    }
    if (!amount_take(connection->budget, size)) return false;
    keep(connection, stream, before.bytes, before.length);
    if (stream->loan.owner) { /* one at a time: a call has one answer that is long */
        keep(connection, stream, loan.bytes.bytes, loan.bytes.length);
        loan_end(&loan);
    } else {
        stream->loan = loan;
    }
    keep(connection, stream, behind.bytes, behind.length);
    await_room(connection, stream);
    return true;
}

void outbox_forget(Connection *connection, Stream *stream) {
    amount_give_back(connection->budget,
                     (int64_t)stream_queued(stream) + stream->refused_bytes);
    stream->refused_bytes = 0;
    buffer_free(&stream->queue);
    buffer_free(&stream->behind);
    loan_end(&stream->loan);
    list_remove(&connection->waiting, stream);
    list_remove(&connection->ready, stream);
}

bool outbox_end(Connection *connection, Stream *stream) {
    if (stream_queued(stream) || !stream->has_trailers) return false;
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
    if (stream_queued(stream) && stream_room(connection, stream) > 0)
        list_add(&connection->ready, stream);
    return true;
}

void outbox_set_initial_window(Connection *connection, uint32_t size) {
    connection->out_initial = size;
    for (Stream *stream = connection->waiting.first; stream;
         stream = list_next(&connection->waiting, stream))
        if (stream_room(connection, stream) > 0) list_add(&connection->ready, stream);
}

static size_t lesser(size_t one, size_t other) { return one < other ? one : other; }

/* Adds the next bytes that wait to what is sent. size: no more than there are. */
static void move_queued(Buffer *out, Stream *stream, size_t size) {
    size_t first = lesser(size, buffer_length(&stream->queue));
    buffer_add(out, buffer_content(&stream->queue), first);
    buffer_drop(&stream->queue, first);
    if (!stream->loan.owner) return;
    Text *lent = &stream->loan.bytes;
    size_t second = lesser(size - first, lent->length);
    buffer_add(out, lent->bytes, second);
    *lent = (Text){lent->bytes + second, lent->length - second};
    if (lent->length || buffer_length(&stream->queue)) return;
    loan_end(&stream->loan);
    buffer_free(&stream->queue);
    stream->queue = stream->behind;
    stream->behind = (Buffer){0};
    move_queued(out, stream, size - first - second);
}

/* Sends one frame of waiting DATA. */
static void send_queued(Connection *connection, Stream *stream) {
    int64_t size = (int64_t)stream_queued(stream);
    if (size > connection->out_window) size = connection->out_window;
    if (size > stream_room(connection, stream)) size = stream_room(connection, stream);
    if (size > (int64_t)MAX_FRAME_BYTES) size = MAX_FRAME_BYTES;
    put_header(&connection->out, (size_t)size, FRAME_DATA, 0, stream->id);
    move_queued(&connection->out, stream, (size_t)size);
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
        if (!stream_queued(stream)) {
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
