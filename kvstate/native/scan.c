#include "scan.h"

#include <stdbool.h>
#include <string.h>

#define TO_BRACE 0x20u /* maps "[" and "{" to "{", and no other byte */

/* At most 255 bytes at once, so that each count fits in one byte: compilers vectorize this. */
Marks scan_marks(const uint8_t *body, size_t length) {
    Marks all = {0};
    for (size_t at = 0; at < length; at += 255) {
        size_t end = length - at < 255 ? length - at : 255;
        uint8_t brackets = 0, quotes = 0, commas = 0;
        for (size_t n = 0; n < end; n++) {
            uint8_t byte = body[at + n];
            brackets += (uint8_t)((byte | TO_BRACE) == '{');
            quotes += byte == '"';
            commas += byte == ',';
        }
        all.brackets += brackets;
        all.quotes += quotes;
        all.commas += commas;
    }
    return all;
}

/* Whether the first byte of a word is its lowest. */
#define IS_LITTLE_ENDIAN (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

/* Sixteen bytes that are looked at together (a vector of GCC and Clang). */
typedef uint8_t Bytes __attribute__((vector_size(16)));

/* Returns the place of the next quote or backslash, or of a byte that has one of these bits; the
 * length if there is none. */
static size_t next_special(const uint8_t *body, size_t length, size_t at, uint8_t bits) {
    for (; length - at >= sizeof(Bytes); at += sizeof(Bytes)) {
        Bytes bytes;
        memcpy(&bytes, body + at, sizeof bytes);
        Bytes found = (Bytes)(bytes == '"') | (Bytes)(bytes == '\\') | (bytes & bits);
        uint64_t halves[2];
        memcpy(halves, &found, sizeof halves);
        if (!(halves[0] | halves[1])) continue;
        if (!IS_LITTLE_ENDIAN) break;
        int zeros = halves[0] ? __builtin_ctzll(halves[0]) : 64 + __builtin_ctzll(halves[1]);
        return at + (size_t)zeros / 8;
    }
    while (at < length && body[at] != '"' && body[at] != '\\' && !(body[at] & bits)) at++;
    return at;
}

#define BEYOND_ASCII 0x80u

Sizes scan_sizes(const uint8_t *body, size_t length) {
    Sizes sizes = {0};
    for (size_t at = 0; at < length; at++) {
        uint8_t byte = body[at];
        if (byte != '"') {
            sizes.values += (uint8_t)(byte | TO_BRACE) == '{' || byte == ',';
            continue;
        }
        size_t start = ++at;
        bool is_wide = false;
        while (at < length) {
            at = next_special(body, length, at, is_wide ? 0 : BEYOND_ASCII);
            if (at >= length || body[at] == '"') break;
            if (body[at] != '\\') {
                is_wide = true;
                continue;
            }
            is_wide |= at + 1 < length && body[at + 1] == 'u';
            at += 2;
        }
        size_t end = at < length ? at : length;
        sizes.text_bytes += (end - start) * (is_wide ? MOST_WIDTH : 1);
    }
    return sizes;
}

Marks scan_marks_outside(const uint8_t *body, size_t length, size_t max_quotes) {
    Marks found = {0};
    bool is_inside = false;
    for (size_t at = 0; at < length && found.quotes <= max_quotes; at++) {
        uint8_t byte = body[at];
        if (byte == '\\') {
            at += at + 1 < length && (body[at + 1] == '"' || body[at + 1] == '\\');
        } else if (byte == '"') {
            found.quotes++;
            is_inside = !is_inside;
        } else if (!is_inside) {
            found.brackets += (uint8_t)(byte | TO_BRACE) == '{';
            found.commas += byte == ',';
        }
    }
    return found;
}

static size_t behind_space(const uint8_t *body, size_t length, size_t at) {
    while (at < length &&
           (body[at] == ' ' || body[at] == '\n' || body[at] == '\r' || body[at] == '\t'))
        at++;
    return at;
}

/* at: behind the opening quote. Returns the place behind the closing one, or NO_OBJECT. */
static size_t behind_text(const uint8_t *body, size_t length, size_t at) {
    while (at < length) {
        at = next_special(body, length, at, 0);
        if (at < length && body[at] == '"') return at + 1;
        at += 2;
    }
    return NO_OBJECT;
}

static uint8_t digit_of(uint8_t byte) {
    if (byte >= '0' && byte <= '9') return (uint8_t)(byte - '0');
    byte |= 0x20; /* upper case to lower case */
    return byte >= 'a' && byte <= 'f' ? (uint8_t)(byte - 'a' + 10) : 0xff;
}

/* Returns the place behind a letter of a text if it stands there, plain or as \u00XX; else 0. */
static size_t behind_letter(const uint8_t *body, size_t at, size_t end, uint8_t letter) {
    if (at < end && body[at] == letter) return at + 1;
    if (at + 6 > end || body[at] != '\\' || body[at + 1] != 'u' || body[at + 2] != '0') return 0;
    if (body[at + 3] != '0' || digit_of(body[at + 4]) != letter >> 4) return 0;
    return digit_of(body[at + 5]) == (letter & 15) ? at + 6 : 0;
}

#define NO_NAME ((size_t)-1)

/* Returns the place among the names of the one that stands here, NO_NAME if none does. */
static size_t name_at(const uint8_t *body, size_t start, size_t end, Names names) {
    const uint8_t *name = names.bytes, *behind = names.bytes + names.length;
    for (size_t place = 0; name < behind; place++) {
        const uint8_t *stop = memchr(name, 0, (size_t)(behind - name));
        size_t at = stop && (size_t)(stop - name) <= end - start ? start : 0;
        for (; at && name < stop; name++) at = behind_letter(body, at, end, *name);
        if (at == end) return place;
        if (!stop) break;
        name = stop + 1;
    }
    return NO_NAME;
}

/* Returns the length of the shortest name: shorter ones, of which there may be millions, are none. */
static size_t shortest_of(Names names) {
    size_t shortest = names.length, start = 0;
    for (size_t n = 0; n < names.length; n++) {
        if (names.bytes[n]) continue;
        if (n - start < shortest) shortest = n - start;
        start = n + 1;
    }
    return shortest;
}

/* Returns the place of the comma or closing bracket that ends a value, or NO_OBJECT. */
static size_t end_of_value(const uint8_t *body, size_t length, size_t at) {
    for (size_t depth = 0; at < length; at++) {
        uint8_t byte = body[at];
        if (byte == '"') {
            at = behind_text(body, length, at + 1) - 1;
            if (at >= length) return NO_OBJECT;
        } else if ((byte | TO_BRACE) == '{') {
            depth++;
        } else if ((byte | TO_BRACE) == '}') {
            if (!depth) return at;
            depth--;
        } else if (byte == ',' && !depth) {
            return at;
        }
    }
    return NO_OBJECT;
}

/* A member's name, and the first byte of its value. */
typedef struct {
    size_t name, name_end, value;
} Key;

/* Reads a name and its colon. at: where a member begins. Returns whether they are there. */
static bool read_key(const uint8_t *body, size_t length, size_t at, Key *key) {
    key->name = behind_space(body, length, at) + 1;
    if (key->name >= length || body[key->name - 1] != '"') return false;
    size_t behind = behind_text(body, length, key->name);
    if (behind == NO_OBJECT) return false;
    key->name_end = behind - 1;
    at = behind_space(body, length, behind);
    if (at >= length || body[at] != ':') return false;
    key->value = behind_space(body, length, at + 1);
    return true;
}

static bool is_null(const uint8_t *body, size_t length, size_t at) {
    return length - at >= 4 && !memcmp(body + at, "null", 4);
}

static bool is_bracket(const uint8_t *body, size_t length, size_t at) {
    return at < length && (body[at] | TO_BRACE) == '{';
}

static size_t look_into(const uint8_t *body, size_t length, size_t at, const Parts *parts,
                        size_t depth, bool *is_named);

/* Looks at one item of a list or an object, which begins here. Returns the place of the comma or
 * bracket behind it, or NO_OBJECT. */
static size_t look_at_item(const uint8_t *body, size_t length, size_t at, bool is_member,
                           const Parts *parts, size_t depth, bool *is_named) {
    bool is_inside = true;
    at = behind_space(body, length, at);
    if (is_member) {
        Key key;
        if (!read_key(body, length, at, &key)) return NO_OBJECT;
        size_t name = name_at(body, key.name, key.name_end, parts->names);
        at = key.value;
        is_inside = name != 0 && name != NO_NAME;
        if (name == 0 && !is_null(body, length, at)) *is_named = true;
    }
    if (is_inside && is_bracket(body, length, at)) {
        at = look_into(body, length, at, parts, depth, is_named);
        if (at == NO_OBJECT) return NO_OBJECT;
    }
    return end_of_value(body, length, at);
}

/* at: the bracket that opens a list or an object. Returns the place behind the one that closes it,
 * or NO_OBJECT. Recursive, up to the depth of the parts. */
static size_t look_into(const uint8_t *body, size_t length, size_t at, const Parts *parts,
                        size_t depth, bool *is_named) {
    if (!depth) { /* too deep to be looked at: it may be named */
        *is_named = true;
        return at;
    }
    uint8_t closing = body[at] == '{' ? '}' : ']';
    size_t first = behind_space(body, length, at + 1);
    if (first < length && body[first] == closing) return first + 1;
    do {
        at = look_at_item(body, length, at + 1, closing == '}', parts, depth - 1, is_named);
        if (at == NO_OBJECT) return NO_OBJECT;
    } while (body[at] == ',');
    return body[at] == closing ? at + 1 : NO_OBJECT;
}

/* Keeps a member if it is asked for. Returns false if there are too many. */
static bool keep_member(const uint8_t *body, size_t name, Key key, size_t start, size_t end,
                        Members *members) {
    if (name == NO_NAME) return true;
    if (members->found == MAX_MEMBERS) return false;
    size_t value_end = end;
    while (value_end > key.value && behind_space(body, value_end, value_end - 1) == value_end)
        value_end--;
    members->each[members->found++] = (Member){name, start, end, key.value, value_end};
    return true;
}

Reading scan_members(const uint8_t *body, size_t start, size_t length, Names names,
                     const Parts *parts, Members *members) {
    size_t at = behind_space(body, length, start), shortest = shortest_of(names);
    members->found = members->count = 0;
    members->is_named = false;
    if (at >= length || body[at] != '{') return READ_NO_OBJECT;
    size_t begun = at + 1;
    at = behind_space(body, length, begun);
    bool is_empty = at < length && body[at] == '}', has_room = true;
    while (!is_empty) {
        Key key;
        if (!read_key(body, length, begun, &key)) return READ_NO_OBJECT;
        bool is_short = key.name_end - key.name < shortest;
        size_t name = is_short ? NO_NAME : name_at(body, key.name, key.name_end, names);
        at = key.value;
        if (name < parts->walked && is_bracket(body, length, at))
            at = look_into(body, length, at, parts, parts->depth, &members->is_named);
        if (at != NO_OBJECT) at = end_of_value(body, length, at);
        if (at == NO_OBJECT || body[at] == ']') return READ_NO_OBJECT;
        has_room = has_room && keep_member(body, name, key, begun, at, members);
        members->count++;
        if (body[at] == '}') break;
        begun = at + 1;
    }
    members->close = at;
    if (behind_space(body, length, at + 1) != length) return READ_NO_OBJECT;
    return has_room ? READ_ALL : READ_TOO_MANY;
}

bool scan_braces(const uint8_t *body, size_t length, size_t *close, bool *is_empty) {
    size_t first = behind_space(body, length, 0), last = length;
    while (last && behind_space(body, last, last - 1) == last) last--;
    if (last - first < 2 || first > last || body[first] != '{' || body[last - 1] != '}')
        return false;
    *close = last - 1;
    *is_empty = behind_space(body, last, first + 1) == last - 1;
    return true;
}

void scan_splice(const uint8_t *body, size_t length, const Edit *edits, size_t count,
                 uint8_t *made) {
    size_t from = 0;
    for (size_t n = 0; n <= count; n++) {
        size_t until = n < count ? edits[n].start : length;
        memcpy(made, body + from, until - from);
        made += until - from;
        if (n == count) break;
        if (edits[n].length) memcpy(made, edits[n].bytes, edits[n].length);
        made += edits[n].length;
        from = edits[n].end;
    }
}
