#include "message.h"

#define METADATA_CONTEXT 8u
#define ATTRIBUTES 9u
#define PROTOCOL_CONFIG 11u

enum { VARINT = 0, FIXED64 = 1, LENGTH_DELIMITED = 2, FIXED32 = 5 };

/* Longer ones are given up: Envoy sends no larger numbers. */
#define MAX_VARINT_BYTES 5u
#define MAX_MODE 127u

typedef struct {
    uint32_t number, type;
    uint64_t value; /* of a VARINT */
    Text content;   /* of LENGTH_DELIMITED */
    Text whole;     /* with its tag */
} Field;

static bool read_varint(Text *rest, uint64_t *value) {
    *value = 0;
    for (unsigned n = 0; n < MAX_VARINT_BYTES && n < rest->length; n++) {
        uint8_t byte = rest->bytes[n];
        *value |= (uint64_t)(byte & 0x7fu) << (7 * n);
        if (byte & 0x80u) continue;
        *rest = (Text){rest->bytes + n + 1, rest->length - n - 1};
        return true;
    }
    return false;
}

static bool skip(Text *rest, uint64_t length) {
    if (length > rest->length) return false;
    *rest = (Text){rest->bytes + length, rest->length - (size_t)length};
    return true;
}

/* Reads the next field; false if it is malformed, a group, or beyond what protobuf allows. */
static bool read_field(Text *rest, Field *field) {
    Text before = *rest;
    uint64_t tag, length;
    if (!read_varint(rest, &tag) || tag > UINT32_MAX || tag >> 3 == 0) return false;
    *field = (Field){.number = (uint32_t)tag >> 3, .type = tag & 7u};
    bool is_read = false;
    if (field->type == VARINT) {
        is_read = read_varint(rest, &field->value);
    } else if (field->type == LENGTH_DELIMITED && read_varint(rest, &length)) {
        field->content.bytes = rest->bytes;
        field->content.length = (size_t)length;
        is_read = skip(rest, length);
    } else if (field->type == FIXED64 || field->type == FIXED32) {
        is_read = skip(rest, field->type == FIXED64 ? 8 : 4);
    }
    field->whole = (Text){before.bytes, before.length - rest->length};
    return is_read;
}

static bool is_ascii(Text text) {
    for (size_t n = 0; n < text.length; n++)
        if (text.bytes[n] & 0x80u) return false;
    return true;
}

/* Reads a HeaderValue; one of its fields given twice is given up. */
static bool read_header(Text rest, ProxyHeader *header) {
    *header = (ProxyHeader){0};
    Text *const texts[] = {&header->key, &header->value, &header->raw_value};
    while (rest.length) {
        Field field;
        if (!read_field(&rest, &field)) return false;
        if (field.number < 1 || field.number > 3) continue;
        Text *text = texts[field.number - 1];
        if (field.type != LENGTH_DELIMITED || text->bytes) return false;
        *text = field.content;
    }
    return is_ascii(header->key) && is_ascii(header->value);
}

bool message_next_header(Text *headers, ProxyHeader *header) {
    Field field;
    while (headers->length && read_field(headers, &field))
        if (field.number == 1) return read_header(field.content, header);
    return false;
}

static bool are_headers(Text headers) {
    while (headers.length) {
        Field field;
        ProxyHeader header;
        if (!read_field(&headers, &field)) return false;
        if (field.number != 1) continue;
        if (field.type != LENGTH_DELIMITED || !read_header(field.content, &header)) return false;
    }
    return true;
}

/* Reads HttpHeaders or HttpTrailers; last: the number of end_of_stream, 0 if there is none. */
static bool read_headers(Text rest, uint32_t last, ProxyMessage *message) {
    while (rest.length) {
        Field field;
        if (!read_field(&rest, &field)) return false;
        if (field.number == 1) {
            if (field.type != LENGTH_DELIMITED || message->headers.bytes) return false;
            message->headers = field.content;
        } else if (last && field.number == last) {
            if (field.type != VARINT) return false;
            message->is_last = field.value != 0;
        }
    }
    return are_headers(message->headers);
}

static bool read_body(Text rest, ProxyMessage *message) {
    while (rest.length) {
        Field field;
        if (!read_field(&rest, &field)) return false;
        if (field.number == 1) {
            if (field.type != LENGTH_DELIMITED || message->body.bytes) return false;
            message->body = field.content;
        } else if (field.number == 2) {
            if (field.type != VARINT) return false;
            message->is_last = field.value != 0;
        }
    }
    return true;
}

static bool read_modes(Text rest, ProxyMessage *message) {
    message->has_modes = true;
    while (rest.length) {
        Field field;
        if (!read_field(&rest, &field)) return false;
        if (field.number > 3) continue;
        if (field.type != VARINT || field.value > MAX_MODE) return false;
        if (field.number == 1) message->request_mode = (uint8_t)field.value;
        if (field.number == 2) message->response_mode = (uint8_t)field.value;
    }
    return true;
}

static bool read_request(const Field *field, ProxyMessage *message) {
    if (message->kind) return false;
    message->kind = field->number;
    switch (field->number) {
    case REQUEST_HEADERS:
    case RESPONSE_HEADERS:
        return read_headers(field->content, 3, message);
    case REQUEST_BODY:
    case RESPONSE_BODY:
        return read_body(field->content, message);
    default:
        return read_headers(field->content, 0, message);
    }
}

bool message_read(const uint8_t *data, size_t length, ProxyMessage *message) {
    Text rest = {data, length};
    *message = (ProxyMessage){0};
    while (rest.length) {
        Field field;
        if (!read_field(&rest, &field)) return false;
        bool is_known = field.number >= REQUEST_HEADERS && field.number <= PROTOCOL_CONFIG &&
                        field.number != 10;
        if (!is_known) continue;
        if (field.type != LENGTH_DELIMITED) return false;
        if (field.number <= RESPONSE_TRAILERS) {
            if (!read_request(&field, message)) return false;
        } else if (field.number == PROTOCOL_CONFIG) {
            if (message->has_modes || !read_modes(field.content, message)) return false;
        } else {
            message->has_context = true;
        }
    }
    return true;
}

void message_add_context(const uint8_t *data, size_t length, Buffer *context) {
    Text rest = {data, length};
    Field field;
    while (rest.length && read_field(&rest, &field))
        if (field.number == METADATA_CONTEXT || field.number == ATTRIBUTES)
            buffer_add(context, field.whole.bytes, field.whole.length);
}
