/* A msgpack reader; every step is bounds-checked. */
#ifndef KVSTEER_READER_H
#define KVSTEER_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_NESTING 32

/* A reader stops at `end`. Once it has failed, it stays failed, and what is then read is 0. */
typedef struct {
    const unsigned char *at, *end;
    bool failed;
} Reader;

typedef struct {
    const unsigned char *at;
    size_t length;
} Text;

static inline uint64_t fail(Reader *reader) {
    reader->failed = true;
    return 0;
}

static inline uint64_t big_endian(Reader *reader, size_t width) {
    if ((size_t)(reader->end - reader->at) < width) return fail(reader);
    uint64_t value = 0;
    for (size_t n = 0; n < width; n++) value = value << 8 | reader->at[n];
    reader->at += width;
    return value;
}

static inline unsigned peek(const Reader *reader) {
    return reader->failed || reader->at == reader->end ? 0xc1 : *reader->at; /* 0xc1: never used */
}

static inline bool take_nil(Reader *reader) {
    if (peek(reader) != 0xc0) return false;
    reader->at++;
    return true;
}

/* The length of an array or a map, by its three tags; fails for anything else. */
static inline size_t take_length(Reader *reader, unsigned fix, unsigned wide16, unsigned wide32) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return fail(reader);
    reader->at++;
    if ((tag & 0xf0) == fix) return tag & 0xf;
    if (tag == wide16) return big_endian(reader, 2);
    if (tag == wide32) return big_endian(reader, 4);
    return fail(reader);
}

static inline size_t take_array(Reader *reader) { return take_length(reader, 0x90, 0xdc, 0xdd); }

static inline size_t take_map(Reader *reader) { return take_length(reader, 0x80, 0xde, 0xdf); }

static inline bool is_array(const Reader *reader) {
    unsigned tag = peek(reader);
    return (tag & 0xf0) == 0x90 || tag == 0xdc || tag == 0xdd;
}

static inline bool is_mapping(const Reader *reader) {
    unsigned tag = peek(reader);
    return (tag & 0xf0) == 0x80 || tag == 0xde || tag == 0xdf;
}

static inline Text take_bytes(Reader *reader, size_t length) {
    if (reader->failed || (size_t)(reader->end - reader->at) < length)
        return (Text){reader->at, fail(reader)};
    Text text = {reader->at, length};
    reader->at += length;
    return text;
}

/* An ASCII text; fails for others, whose UTF-8 the typed decoder checks. */
static inline Text take_text(Reader *reader) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return (Text){reader->at, fail(reader)};
    reader->at++;
    size_t length = (tag & 0xe0) == 0xa0 ? tag & 0x1f
                    : tag == 0xd9        ? big_endian(reader, 1)
                    : tag == 0xda        ? big_endian(reader, 2)
                                         : fail(reader);
    Text text = take_bytes(reader, length);
    unsigned char every = 0;
    for (size_t n = 0; n < text.length; n++) every |= text.at[n];
    if (every & 0x80) fail(reader);
    return text;
}

/* Any integer, as its 64 bits. */
static inline uint64_t take_integer(Reader *reader) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return fail(reader);
    reader->at++;
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return (uint64_t)(int64_t)(int8_t)tag;
    switch (tag) {
        case 0xcc: return big_endian(reader, 1);
        case 0xcd: return big_endian(reader, 2);
        case 0xce: return big_endian(reader, 4);
        case 0xcf: return big_endian(reader, 8);
        case 0xd0: return (uint64_t)(int64_t)(int8_t)big_endian(reader, 1);
        case 0xd1: return (uint64_t)(int64_t)(int16_t)big_endian(reader, 2);
        case 0xd2: return (uint64_t)(int64_t)(int32_t)big_endian(reader, 4);
        case 0xd3: return big_endian(reader, 8);
        default: return fail(reader);
    }
}

/* An integer from 0 to limit; fails for any other, including negative ones. */
static inline uint64_t take_count(Reader *reader, uint64_t limit) {
    unsigned tag = peek(reader);
    bool negative = tag >= 0xe0 || (tag >= 0xd0 && tag <= 0xd3);
    uint64_t value = take_integer(reader);
    return negative || value > limit ? fail(reader) : value;
}

/* Skips a value that contains no others. */
static inline void skip_scalar(Reader *reader) {
    unsigned tag = peek(reader);
    if ((tag & 0xe0) == 0xa0 || tag == 0xd9 || tag == 0xda) {
        take_text(reader);
    } else if (tag < 0x80 || tag >= 0xe0 || tag == 0xc0 || tag == 0xc2 || tag == 0xc3) {
        reader->at++;
    } else if (tag == 0xc4 || tag == 0xc5) {
        reader->at++;
        take_bytes(reader, big_endian(reader, tag == 0xc4 ? 1 : 2));
    } else if (tag >= 0xca && tag <= 0xd3) {
        static const unsigned char widths[] = {4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
        reader->at++;
        take_bytes(reader, widths[tag - 0xca]);
    } else {
        fail(reader); /* extensions and huge texts: no engine sends them */
    }
}

/* Skips one value of any type, without recursion. Fails if values are nested deeper than any engine
 * nests them, or if a map has an array or a map as a key: the typed decoder rejects such messages
 * as a whole. */
static inline void skip(Reader *reader) {
    uint64_t left[MAX_NESTING] = {1}; /* values, on each level */
    bool is_map[MAX_NESTING] = {false};
    unsigned level = 0;
    while (!reader->failed) {
        while (!left[level]) {
            if (!level--) return;
        }
        bool is_key = is_map[level] && left[level] % 2 == 0;
        left[level]--;
        if (!is_array(reader) && !is_mapping(reader)) {
            skip_scalar(reader);
        } else if (is_key || ++level == MAX_NESTING) {
            fail(reader);
        } else {
            is_map[level] = is_mapping(reader);
            left[level] = is_map[level] ? 2 * (uint64_t)take_map(reader) : take_array(reader);
        }
    }
}

static inline bool text_is(Text text, const char *word) {
    return text.length == strlen(word) && !memcmp(text.at, word, text.length);
}

#endif
