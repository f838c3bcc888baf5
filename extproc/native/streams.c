/* The table of a connection's streams, and lists of some of them. */
#include "connection.h"

#define FIRST_SLOTS 16u

static size_t home_of(const StreamTable *table, uint32_t id) {
    return (size_t)(id >> 1) & (table->capacity - 1); /* numbers are odd, and rise */
}

static Stream **slot_of(const StreamTable *table, uint32_t id) {
    size_t at = home_of(table, id);
    while (table->slots[at] && table->slots[at]->id != id) at = (at + 1) & (table->capacity - 1);
    return &table->slots[at];
}

static bool grow(StreamTable *table) {
    size_t capacity = table->capacity ? table->capacity * 2 : FIRST_SLOTS;
    StreamTable grown = {calloc(capacity, sizeof(Stream *)), capacity, table->used};
    if (!grown.slots) return false;
    for (size_t at = 0; at < table->capacity; at++)
        if (table->slots[at]) *slot_of(&grown, table->slots[at]->id) = table->slots[at];
    free(table->slots);
    *table = grown;
    return true;
}

Stream *connection_find(const Connection *connection, uint32_t stream_id) {
    return connection->streams.capacity ? *slot_of(&connection->streams, stream_id) : NULL;
}

Stream *table_add(StreamTable *table, uint32_t id) {
    if (table->used * 2 >= table->capacity && !grow(table)) return NULL;
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->id = id;
    *slot_of(table, id) = stream;
    table->used++;
    return stream;
}

/* Moves streams that probing found behind the freed slot towards their homes. */
static void close_gap(StreamTable *table, size_t gap) {
    size_t mask = table->capacity - 1;
    for (size_t at = (gap + 1) & mask; table->slots[at]; at = (at + 1) & mask) {
        size_t home = home_of(table, table->slots[at]->id);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        table->slots[gap] = table->slots[at];
        table->slots[at] = NULL;
        gap = at;
    }
}

void loan_end(Loan *loan) {
    void *owner = loan->owner;
    loan->owner = NULL;
    loan->bytes.length = 0;
    if (owner) loan->give_back(owner);
}

size_t stream_queued(const Stream *stream) {
    return buffer_length(&stream->queue) + stream->loan.bytes.length +
           buffer_length(&stream->behind);
}

static void stream_free(Stream *stream) {
    buffer_free(&stream->queue);
    loan_end(&stream->loan);
    buffer_free(&stream->behind);
    buffer_free(&stream->trailers);
    buffer_free(&stream->incomplete);
    free(stream);
}

void connection_release(Connection *connection, Stream *stream) {
    if (stream->is_open || stream->has_call) return;
    StreamTable *table = &connection->streams;
    Stream **slot = slot_of(table, stream->id);
    *slot = NULL;
    table->used--;
    close_gap(table, (size_t)(slot - table->slots));
    stream_free(stream);
}

void table_free(StreamTable *table) {
    for (size_t at = 0; at < table->capacity; at++)
        if (table->slots[at]) stream_free(table->slots[at]);
    free(table->slots);
    *table = (StreamTable){0};
}

static Link *link_of(const StreamList *list, const Stream *stream) {
    return (Link *)((char *)stream + list->offset);
}

void list_add(StreamList *list, Stream *stream) {
    Link *link = link_of(list, stream);
    if (link->is_in) return;
    *link = (Link){list->last, NULL, true};
    if (list->last)
        link_of(list, list->last)->after = stream;
    else
        list->first = stream;
    list->last = stream;
}

void list_remove(StreamList *list, Stream *stream) {
    Link *link = link_of(list, stream);
    if (!link->is_in) return;
    if (link->before)
        link_of(list, link->before)->after = link->after;
    else
        list->first = link->after;
    if (link->after)
        link_of(list, link->after)->before = link->before;
    else
        list->last = link->before;
    *link = (Link){0};
}

Stream *list_next(const StreamList *list, const Stream *stream) {
    return link_of(list, stream)->after;
}
