#include "head.h"

#define HAS_METHOD 1u
#define HAS_SCHEME 2u
#define HAS_PATH 4u
#define HAS_AUTHORITY 8u
#define REQUIRED (HAS_METHOD | HAS_SCHEME | HAS_PATH)

#define MAX_LENGTH_DIGITS 19u

static bool is_text(Text text, const char *word) {
    size_t length = strlen(word);
    return text.length == length && !memcmp(text.bytes, word, length);
}

static bool is_letter_for(uint8_t byte, char lower) {
    return byte == (uint8_t)lower || (byte >= 'A' && byte <= 'Z' && (byte | 0x20) == lower);
}

/* Whether a text begins with these lower-case characters, in whatever case. */
static bool begins_with(Text text, const char *start) {
    size_t length = strlen(start);
    if (text.length < length) return false;
    for (size_t n = 0; n < length; n++)
        if (!is_letter_for(text.bytes[n], start[n])) return false;
    return true;
}

static bool is_grpc_type(Text type) {
    static const char *const TYPES[] = {"application/grpc", "application/grpc+proto"};
    for (size_t n = 0; n < 2; n++) {
        size_t length = strlen(TYPES[n]);
        if (begins_with(type, TYPES[n]) && (type.length == length || type.bytes[length] == ';'))
            return true;
    }
    return false;
}

/* RFC 9113, section 8.2.1. */
static bool is_name(Text name) {
    for (size_t n = 0; n < name.length; n++) {
        uint8_t byte = name.bytes[n];
        if (byte <= 0x20 || byte >= 0x7f || byte == ':' || (byte >= 'A' && byte <= 'Z')) return false;
    }
    return name.length > 0;
}

static bool is_blank(uint8_t byte) { return byte == ' ' || byte == '\t'; }

static bool is_value(Text value) {
    for (size_t n = 0; n < value.length; n++)
        if (!value.bytes[n] || value.bytes[n] == '\r' || value.bytes[n] == '\n') return false;
    return !value.length ||
           !(is_blank(value.bytes[0]) || is_blank(value.bytes[value.length - 1]));
}

/* Section 8.2.2: headers about the connection are malformed in HTTP/2. */
static bool is_forbidden(Text name, Text value) {
    static const char *const NAMES[] = {"connection", "proxy-connection", "keep-alive",
                                        "transfer-encoding", "upgrade"};
    for (size_t n = 0; n < sizeof NAMES / sizeof *NAMES; n++)
        if (is_text(name, NAMES[n])) return true;
    return is_text(name, "te") && !is_text(value, "trailers");
}

static uint8_t pseudo_header(Text name) {
    if (is_text(name, ":method")) return HAS_METHOD;
    if (is_text(name, ":scheme")) return HAS_SCHEME;
    if (is_text(name, ":path")) return HAS_PATH;
    return is_text(name, ":authority") ? HAS_AUTHORITY : 0;
}

/* Reads a content-length; returns false if it is none. */
static bool read_length(Text value, uint64_t *length) {
    *length = 0;
    for (size_t n = 0; n < value.length; n++) {
        if (value.bytes[n] < '0' || value.bytes[n] > '9') return false;
        if (n < MAX_LENGTH_DIGITS) *length = *length * 10 + (uint64_t)(value.bytes[n] - '0');
    }
    return value.length > 0 && value.length <= MAX_LENGTH_DIGITS;
}

/* Copies a text behind the others; returns where. */
static size_t kept_at(Head *head, Text text) {
    size_t at = buffer_length(head->texts);
    buffer_add(head->texts, text.bytes, text.length);
    return at;
}

static void take_pseudo(Head *head, Text name, Text value) {
    uint8_t kind = pseudo_header(name);
    if (head->is_regular || !kind || head->seen & kind) head->is_malformed = true;
    head->seen |= kind;
    if (kind == HAS_METHOD) {
        head->is_post = is_text(value, "POST");
        head->is_head = is_text(value, "HEAD");
    }
    if (kind != HAS_PATH || head->is_malformed) return;
    head->path_at = kept_at(head, value);
    head->path_length = value.length;
}

static void take_regular(Head *head, Text name, Text value) {
    head->is_regular = true;
    if (!is_name(name) || is_forbidden(name, value)) {
        head->is_malformed = true;
    } else if (is_text(name, "content-type")) {
        head->is_grpc = is_grpc_type(value);
    } else if (is_text(name, "grpc-encoding")) {
        head->is_compressed = value.length && !is_text(value, "identity");
    } else if (is_text(name, "content-length")) {
        head->has_length = true; /* the last one counts */
        head->content_length = UINT64_MAX;
        uint64_t length;
        if (read_length(value, &length)) head->content_length = length;
    } else if (is_text(name, "traceparent") && !head->trace_length) {
        head->trace_at = kept_at(head, value);
        head->trace_length = value.length;
    }
}

void head_begin(Head *head, Buffer *texts) { *head = (Head){.texts = texts}; }

void head_take(void *taker, Text name, Text value) {
    Head *head = taker;
    if (head->is_malformed) return;
    if (name.length && name.bytes[0] == ':')
        take_pseudo(head, name, value);
    else
        take_regular(head, name, value);
    if (!is_value(value)) head->is_malformed = true;
}

void head_end(Head *head) {
    if (head->has_length && head->content_length == UINT64_MAX) head->is_malformed = true;
    head->is_request = (head->seen & REQUIRED) == REQUIRED && head->path_length > 0;
    head->is_trailers = !head->seen;
}

RequestKind head_kind(const Head *head) {
    if (!head->is_post) return WRONG_METHOD;
    if (!head->is_grpc) return WRONG_TYPE;
    return head->is_compressed ? COMPRESSED : GRPC_CALL;
}
