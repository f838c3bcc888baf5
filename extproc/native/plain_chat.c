#include "plain_chat.h"

#include <string.h>

/* Lists and objects of members that do not count may be nested this deeply. */
enum { MOST_NESTED = 16 };

/* Longer numbers are left to the decoder. */
enum { MOST_DIGITS = 20 };

/* place: the next byte. is_broken: what was read is not plain, or no JSON. */
typedef struct {
    const uint8_t *place, *end;
    bool is_broken;
} Reader;

typedef struct {
    const uint8_t *bytes;
    size_t length;
} Piece;

static void skip_space(Reader *reader) {
    while (reader->place < reader->end) {
        uint8_t byte = *reader->place;
        if (byte != ' ' && byte != '\n' && byte != '\t' && byte != '\r') return;
        reader->place++;
    }
}

/* Skips white space, and returns the next byte, 0 at the end. */
static uint8_t next_mark(Reader *reader) {
    skip_space(reader);
    return reader->place < reader->end ? *reader->place : 0;
}

/* Skips a mark, maybe behind white space. */
static void skip_mark(Reader *reader, uint8_t mark) {
    if (next_mark(reader) == mark)
        reader->place++;
    else
        reader->is_broken = true;
}

/* Whether the first byte of a word is its lowest. */
#define IS_LITTLE_ENDIAN (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

/* Sixteen bytes that are compared at once (a vector of GCC and Clang). */
typedef uint8_t Bytes __attribute__((vector_size(16)));

/* Skips the bytes of a text that mean nothing but themselves. */
static void skip_ordinary(Reader *reader) {
    const uint8_t *place = reader->place, *end = reader->end;
    while ((size_t)(end - place) >= sizeof(Bytes)) {
        Bytes bytes;
        memcpy(&bytes, place, sizeof bytes);
        Bytes marks = (Bytes)(bytes == '"') | (Bytes)(bytes == '\\') | (Bytes)(bytes < 0x20);
        uint64_t halves[2];
        memcpy(halves, &marks, sizeof halves);
        if (!(halves[0] | halves[1])) {
            place += sizeof bytes;
            continue;
        }
        if (!IS_LITTLE_ENDIAN) break;
        int zeros = halves[0] ? __builtin_ctzll(halves[0]) : 64 + __builtin_ctzll(halves[1]);
        reader->place = place + zeros / 8;
        return;
    }
    while (place < end && *place != '"' && *place != '\\' && *place >= 0x20) place++;
    reader->place = place;
}

/* Reads a text up to its closing quote; returns what is between the quotes.
 *
 * is_decoded: whether somebody else looks at the escapes. Otherwise simple ones alone are taken. */
static Piece read_text(Reader *reader, bool is_decoded) {
    skip_mark(reader, '"');
    const uint8_t *start = reader->place;
    while (!reader->is_broken) {
        skip_ordinary(reader);
        if (reader->end - reader->place < 2) break; /* a text is never the last byte of a body */
        if (*reader->place == '"') {
            Piece piece = {start, (size_t)(reader->place - start)};
            reader->place++;
            return piece;
        }
        if (*reader->place != '\\' ||
            (!is_decoded && (!reader->place[1] || !strchr("\"\\/bfnrt", reader->place[1]))))
            break;
        reader->place += 2;
    }
    reader->is_broken = true;
    return (Piece){start, 0};
}

static bool equals(Piece piece, const char *text) {
    size_t length = strlen(text);
    return piece.length == length && !memcmp(piece.bytes, text, length);
}

/* Skips one or more digits. */
static void skip_digits(Reader *reader) {
    const uint8_t *start = reader->place;
    while (reader->place < reader->end && *reader->place >= '0' && *reader->place <= '9')
        reader->place++;
    if (reader->place == start) reader->is_broken = true;
}

static bool skip_any(Reader *reader, const char *marks) {
    bool is_there = reader->place < reader->end && *reader->place &&
                    strchr(marks, *reader->place) != NULL;
    reader->place += is_there;
    return is_there;
}

static void skip_number(Reader *reader) {
    const uint8_t *start = reader->place;
    skip_any(reader, "-");
    if (!skip_any(reader, "0")) skip_digits(reader);
    if (skip_any(reader, ".")) skip_digits(reader);
    if (skip_any(reader, "eE")) {
        skip_any(reader, "+-");
        skip_digits(reader);
    }
    if (reader->place - start > MOST_DIGITS) reader->is_broken = true;
}

static void skip_word(Reader *reader, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(reader->end - reader->place) < length || memcmp(reader->place, word, length))
        reader->is_broken = true;
    else
        reader->place += length;
}

/* Skips a value that is no list and no object. */
static void skip_scalar(Reader *reader) {
    switch (next_mark(reader)) {
        case '"': read_text(reader, false); return;
        case 't': skip_word(reader, "true"); return;
        case 'f': skip_word(reader, "false"); return;
        case 'n': skip_word(reader, "null"); return;
        default: skip_number(reader);
    }
}

/* Skips the name of a member and its colon. */
static void skip_name(Reader *reader) {
    read_text(reader, false);
    skip_mark(reader, ':');
}

/* Skips a value of any kind. */
static void skip_value(Reader *reader) {
    uint8_t closing[MOST_NESTED];
    size_t depth = 0;
    while (!reader->is_broken) {
        uint8_t mark = next_mark(reader);
        if (mark == '[' || mark == '{') {
            if (depth == MOST_NESTED) break;
            reader->place++;
            closing[depth++] = mark == '[' ? ']' : '}';
            if (next_mark(reader) != closing[depth - 1]) {
                if (mark == '{') skip_name(reader);
                continue;
            }
        } else {
            skip_scalar(reader);
        }
        while (!reader->is_broken && depth && next_mark(reader) == closing[depth - 1]) {
            reader->place++;
            depth--;
        }
        if (!depth) return;
        skip_mark(reader, ',');
        if (closing[depth - 1] == '}' && !reader->is_broken) skip_name(reader);
    }
    reader->is_broken = true;
}

typedef struct {
    Piece role, content;
} Message;

/* Reads a member of a message: its role or its content, whichever there is not yet. */
static void read_part(Reader *reader, Message *message) {
    Piece name = read_text(reader, false);
    bool is_content = equals(name, "content");
    Piece *part = is_content ? &message->content : &message->role;
    if ((!is_content && !equals(name, "role")) || part->bytes) reader->is_broken = true;
    skip_mark(reader, ':');
    *part = read_text(reader, is_content);
}

static bool is_role(Piece role) {
    return equals(role, "user") || equals(role, "assistant") || equals(role, "system");
}

static void read_message(Reader *reader, const uint8_t *body, PlainChat *chat) {
    Message message = {{NULL, 0}, {NULL, 0}};
    skip_mark(reader, '{');
    read_part(reader, &message);
    skip_mark(reader, ',');
    read_part(reader, &message);
    skip_mark(reader, '}');
    if (!is_role(message.role) || chat->count == MOST_PLAIN_MESSAGES) reader->is_broken = true;
    if (reader->is_broken) return;
    uint64_t start = (uint64_t)(message.content.bytes - body);
    chat->roles[chat->count] = *message.role.bytes;
    chat->contents[chat->count++] = (ContentSpan){start, start + message.content.length};
}

static void read_messages(Reader *reader, const uint8_t *body, PlainChat *chat) {
    skip_mark(reader, '[');
    if (chat->count) reader->is_broken = true; /* there are some already */
    while (!reader->is_broken) {
        read_message(reader, body, chat);
        if (reader->is_broken || next_mark(reader) == ']') break;
        skip_mark(reader, ',');
    }
    skip_mark(reader, ']');
}

/* Reads a word, or null, if there is none yet. */
static void read_word(Reader *reader, PlainWord *word) {
    if (word->is_there) reader->is_broken = true;
    word->is_there = true;
    if (next_mark(reader) == 'n') {
        skip_word(reader, "null");
        return;
    }
    Piece read = read_text(reader, false);
    for (size_t n = 0; n < read.length; n++)
        if (read.bytes[n] >= 0x80 || read.bytes[n] == '\\') reader->is_broken = true;
    word->bytes = read.bytes;
    word->length = read.length;
}

/* Whether what is behind its length at a place equals a piece. */
static bool is_at(const uint8_t *place, Piece piece) {
    return *place == piece.length && !memcmp(place + 1, piece.bytes, piece.length);
}

/* Returns the values that a member may have; NULL if it may have any. */
static const uint8_t *values_of(Piece name, const uint8_t *limited) {
    while (*limited) {
        bool is_name = is_at(limited, name);
        limited += 1 + *limited;
        if (is_name) return limited;
        while (*limited) limited += 1 + *limited;
        limited++;
    }
    return NULL;
}

/* Reads a value that must be one of these. */
static void read_value(Reader *reader, const uint8_t *values) {
    skip_space(reader);
    const uint8_t *start = reader->place;
    skip_scalar(reader);
    Piece value = {start, (size_t)(reader->place - start)};
    for (; *values; values += 1 + *values)
        if (is_at(values, value)) return;
    reader->is_broken = true;
}

static void read_member(Reader *reader, const uint8_t *body, const uint8_t *limited,
                        PlainChat *chat) {
    Piece name = read_text(reader, false);
    skip_mark(reader, ':');
    if (memchr(name.bytes, '\\', name.length)) reader->is_broken = true;
    if (reader->is_broken) return;
    const uint8_t *values = values_of(name, limited);
    if (values)
        read_value(reader, values);
    else if (equals(name, "messages"))
        read_messages(reader, body, chat);
    else if (equals(name, "model"))
        read_word(reader, &chat->model);
    else if (equals(name, "cache_salt"))
        read_word(reader, &chat->salt);
    else
        skip_value(reader);
}

bool plain_chat_read(const uint8_t *body, size_t length, const uint8_t *limited,
                     PlainChat *chat) {
    Reader reader = {body, body + length, false};
    chat->model = chat->salt = (PlainWord){NULL, 0, false};
    chat->count = 0;
    skip_mark(&reader, '{');
    while (!reader.is_broken) {
        read_member(&reader, body, limited, chat);
        if (reader.is_broken || next_mark(&reader) == '}') break;
        skip_mark(&reader, ',');
    }
    skip_mark(&reader, '}');
    skip_space(&reader);
    return !reader.is_broken && reader.place == reader.end && chat->count;
}
