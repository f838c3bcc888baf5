/* Bytes that grow at the end and are used up from the front.
 *
 * Without memory a buffer breaks: it stays as it is, and `is_broken` says so to whoever owns it. */
#ifndef KVSTEER_BUFFER_H
#define KVSTEER_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t *bytes;
    size_t start, end, room; /* its content lies from start to end */
    bool is_broken;
} Buffer;

/* A buffer that is empty again keeps at most this much memory. */
#define KEPT_BYTES 65536u
#define FIRST_BYTES 256u

static inline size_t buffer_length(const Buffer *buffer) { return buffer->end - buffer->start; }

static inline void buffer_free(Buffer *buffer) {
    free(buffer->bytes);
    *buffer = (Buffer){0};
}

static inline void buffer_clear(Buffer *buffer) {
    if (buffer->room > KEPT_BYTES) buffer_free(buffer);
    buffer->start = buffer->end = 0;
}

/* Makes room for more bytes at the end. */
static inline bool buffer_reserve(Buffer *buffer, size_t more) {
    if (buffer->is_broken) return false;
    if (buffer->room - buffer->end >= more) return true;
    size_t length = buffer_length(buffer);
    if (buffer->start && buffer->start >= length && buffer->room - length >= more) {
        memcpy(buffer->bytes, buffer->bytes + buffer->start, length);
        buffer->start = 0;
        buffer->end = length;
        return true;
    }
    size_t room = buffer->room ? buffer->room : FIRST_BYTES;
    while (room - length < more && room <= SIZE_MAX / 2) room *= 2;
    uint8_t *bytes = room - length < more ? NULL : malloc(room);
    if (!bytes) {
        buffer->is_broken = true;
        return false;
    }
    if (length) memcpy(bytes, buffer->bytes + buffer->start, length);
    free(buffer->bytes);
    *buffer = (Buffer){bytes, 0, length, room, false};
    return true;
}

static inline void buffer_add(Buffer *buffer, const void *bytes, size_t length) {
    if (!length || !buffer_reserve(buffer, length)) return;
    memcpy(buffer->bytes + buffer->end, bytes, length);
    buffer->end += length;
}

static inline void buffer_add_byte(Buffer *buffer, uint8_t byte) { buffer_add(buffer, &byte, 1); }

/* Drops bytes from the front. */
static inline void buffer_drop(Buffer *buffer, size_t length) {
    buffer->start += length;
    if (buffer->start >= buffer->end) buffer_clear(buffer);
}

/* Gives back memory that the content does not need. */
static inline void buffer_shrink(Buffer *buffer) {
    Buffer shrunk = {0};
    if (buffer_length(buffer) && buffer->room <= KEPT_BYTES) return;
    buffer_add(&shrunk, buffer->bytes + buffer->start, buffer_length(buffer));
    free(buffer->bytes);
    *buffer = shrunk;
}

static inline const uint8_t *buffer_content(const Buffer *buffer) {
    return buffer->bytes ? buffer->bytes + buffer->start : NULL;
}

#endif
