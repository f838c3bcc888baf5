/* Reads the fields of an ext_proc ProcessingRequest that the router uses (proto/kvsteer_ext_proc.proto).
 *
 * Reads what Envoy sends, and gives up everything else: what is malformed, merged out of several
 * parts, or not ASCII where that would have to be checked. protobuf then reads it. */
#ifndef KVSTEER_MESSAGE_H
#define KVSTEER_MESSAGE_H

#include <stdbool.h>

#include "hpack.h"

#define REQUEST_HEADERS 2u
#define RESPONSE_HEADERS 3u
#define REQUEST_BODY 4u
#define RESPONSE_BODY 5u
#define REQUEST_TRAILERS 6u
#define RESPONSE_TRAILERS 7u

/* kind: the field that is set, 0 if none is. headers: of a HeaderMap, without its own tag. */
typedef struct {
    uint32_t kind;
    Text headers, body;
    bool is_last, has_modes, has_context;
    uint8_t request_mode, response_mode;
} ProxyMessage;

typedef struct {
    Text key, value, raw_value;
} ProxyHeader;

/* Returns false if it gives up. All headers of a message that it reads can be read. */
bool message_read(const uint8_t *data, size_t length, ProxyMessage *message);

/* Reads the next header and removes it from the rest; false at the end. */
bool message_next_header(Text *headers, ProxyHeader *header);

/* Adds the fields metadata_context and attributes as they stand in a message that was read. */
void message_add_context(const uint8_t *data, size_t length, Buffer *context);

#endif
