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

static bool is_named(const uint8_t *body, size_t start, size_t end, const uint8_t *names,
                     size_t names_length) {
    const uint8_t *name = names, *behind = names + names_length;
    while (name < behind) {
        const uint8_t *stop = memchr(name, 0, (size_t)(behind - name));
        size_t at = stop && (size_t)(stop - name) <= end - start ? start : 0;
        for (; at && name < stop; name++) at = behind_letter(body, at, end, *name);
        if (at == end) return true;
        if (!stop) break;
        name = stop + 1;
    }
    return false;
}

/* Returns the length of the shortest name: shorter ones, of which there may be millions, are none. */
static size_t shortest_of(const uint8_t *names, size_t names_length) {
    size_t shortest = names_length, start = 0;
    for (size_t n = 0; n < names_length; n++) {
        if (names[n]) continue;
        if (n - start < shortest) shortest = n - start;
        start = n + 1;
    }
    return shortest;
}

/* Returns the place of the comma or brace that ends a value, or NO_OBJECT. */
static size_t end_of_value(const uint8_t *body, size_t length, size_t at) {
    for (size_t depth = 0; at < length; at++) {
        uint8_t byte = body[at];
        if (byte == '"') {
            at = behind_text(body, length, at + 1) - 1;
            if (at >= length) return NO_OBJECT;
        } else if ((byte | TO_BRACE) == '{') {
            depth++;
        } else if ((byte | TO_BRACE) == '}') {
            if (!depth) return byte == '}' ? at : NO_OBJECT;
            depth--;
        } else if (byte == ',' && !depth) {
            return at;
        }
    }
    return NO_OBJECT;
}

size_t scan_members(const uint8_t *body, size_t length, const uint8_t *names, size_t names_length,
                    Span *spans, size_t most) {
    size_t found = 0, at = behind_space(body, length, 0);
    size_t shortest = shortest_of(names, names_length);
    if (at >= length || body[at] != '{') return NO_OBJECT;
    size_t start = at + 1;
    at = behind_space(body, length, start);
    bool is_empty = at < length && body[at] == '}';
    while (!is_empty) {
        size_t name = behind_space(body, length, start) + 1;
        if (name >= length || body[name - 1] != '"') return NO_OBJECT;
        size_t behind = behind_text(body, length, name);
        if (behind == NO_OBJECT) return NO_OBJECT;
        at = behind_space(body, length, behind);
        if (at >= length || body[at] != ':') return NO_OBJECT;
        at = end_of_value(body, length, at + 1);
        if (at == NO_OBJECT) return NO_OBJECT;
        if (behind - 1 - name >= shortest &&
            is_named(body, name, behind - 1, names, names_length)) {
            if (found == most) return most + 1;
            spans[found++] = (Span){start, at};
        }
        if (body[at] == '}') break;
        start = at + 1;
    }
    return behind_space(body, length, at + 1) == length ? found : NO_OBJECT;
}
