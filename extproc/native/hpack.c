#include "hpack.h"

#include "hpack_tables.h"

/* The first byte (section 6): 1xxxxxxx an index; 01xxxxxx, 0001xxxx and 0000xxxx literals, with the
 * index of their name or 0; 001xxxxx a table size. The x begin an integer (section 5.1). */
#define INDEXED 0x80u
#define ADDED 0x40u
#define SIZE_UPDATE 0x20u
#define HUFFMAN 0x80u
#define MORE 0x80u

/* Section 4.2: a block may set the smallest size in between, and the last size. */
#define MAX_SIZE_UPDATES 2u

/* An integer of more bytes is refused. */
#define MAX_INTEGER_BYTES 6u

/* The part of a block that is not read yet. */
typedef struct {
    const uint8_t *at, *end;
} Rest;

void hpack_init(Hpack *hpack, size_t max_list_bytes) {
    *hpack = (Hpack){.max_bytes = DEFAULT_TABLE_BYTES,
                     .allowed_bytes = DEFAULT_TABLE_BYTES,
                     .max_list_bytes = max_list_bytes};
}

static void evict_to(Hpack *hpack, size_t bytes) {
    while (hpack->used_bytes > bytes) {
        uint32_t oldest = (hpack->newest + MAX_TABLE_FIELDS + 1 - hpack->count) % MAX_TABLE_FIELDS;
        TableField *field = &hpack->fields[oldest];
        hpack->used_bytes -= field->name_length + field->value_length + FIELD_BYTES;
        hpack->count--;
        free(field->bytes);
        *field = (TableField){0};
    }
}

void hpack_free(Hpack *hpack) {
    evict_to(hpack, 0);
    buffer_free(&hpack->name);
    buffer_free(&hpack->value);
}

void hpack_forbid_table(Hpack *hpack) {
    hpack->allowed_bytes = 0;
    hpack->owes_size = hpack->count > 0;
}

bool hpack_is_stateless(const Hpack *hpack, const uint8_t *block, size_t length) {
    return !hpack->max_bytes && length && (block[0] & 0xe0u) != SIZE_UPDATE;
}

static bool read_integer(Rest *rest, uint8_t prefix_max, uint64_t *number) {
    if (rest->at == rest->end) return false;
    *number = *rest->at++ & prefix_max;
    if (*number != prefix_max) return true;
    for (unsigned read = 1, shift = 0; read < MAX_INTEGER_BYTES; read++, shift += 7) {
        if (rest->at == rest->end) return false;
        uint8_t byte = *rest->at++;
        *number += (uint64_t)(byte & 0x7fu) << shift;
        if (!(byte & MORE)) return true;
    }
    return false;
}

/* Decodes the code that begins the bits, of which `count` are left; the others are ones. Returns
 * its length, 0 if no code that ends here begins so. */
static unsigned decode_symbol(uint32_t bits, unsigned count, uint16_t *symbol) {
    uint32_t first = 0, before = 0; /* the first code of a length, and how many codes are shorter */
    for (unsigned length = SHORTEST_CODE; length <= LONGEST_CODE && length <= count; length++) {
        first <<= 1;
        uint32_t code = bits >> (32 - length);
        if (code - first < CODES_OF_LENGTH[length]) {
            *symbol = SYMBOLS[before + code - first];
            return length;
        }
        first += CODES_OF_LENGTH[length];
        before += CODES_OF_LENGTH[length];
    }
    return 0;
}

/* Section 5.2: what is left of the last byte is the beginning of END_OF_STRING, which are ones. */
static bool is_padding(uint32_t bits, unsigned count) { return count < 8 && bits == UINT32_MAX; }

static bool decode_huffman(const uint8_t *bytes, size_t length, Buffer *text) {
    const uint8_t *end = bytes + length;
    uint64_t waiting = 0;
    unsigned count = 0;
    buffer_clear(text);
    if (!buffer_reserve(text, length * 8 / 5 + 1)) return false;
    for (;;) {
        for (; bytes < end && count <= 56; count += 8) waiting = waiting << 8 | *bytes++;
        if (!count) return true;
        uint32_t bits = count >= 32 ? (uint32_t)(waiting >> (count - 32))
                                    : (uint32_t)(waiting << (32 - count)) | UINT32_MAX >> count;
        uint16_t symbol = 0;
        unsigned used = decode_symbol(bits, count, &symbol);
        if (!used) return bytes == end && is_padding(bits, count);
        if (symbol == END_OF_STRING) return false;
        text->bytes[text->end++] = (uint8_t)symbol;
        count -= used;
    }
}

/* Reads a string (section 5.2). scratch: for its text if it is encoded. */
static bool read_text(Rest *rest, Buffer *scratch, Text *text) {
    if (rest->at == rest->end) return false;
    bool is_encoded = *rest->at & HUFFMAN;
    uint64_t length;
    if (!read_integer(rest, 0x7f, &length) || length > (size_t)(rest->end - rest->at)) return false;
    *text = (Text){rest->at, (size_t)length};
    rest->at += length;
    if (!is_encoded) return true;
    if (!decode_huffman(text->bytes, text->length, scratch)) return false;
    *text = (Text){scratch->bytes, buffer_length(scratch)};
    return true;
}

static bool read_indexed(const Hpack *hpack, uint64_t index, Text *name, Text *value) {
    if (!index) return false;
    if (index <= STATIC_FIELDS) {
        const StaticField *field = &STATIC_TABLE[index - 1];
        *name = (Text){(const uint8_t *)field->name, strlen(field->name)};
        *value = (Text){(const uint8_t *)field->value, strlen(field->value)};
        return true;
    }
    index -= STATIC_FIELDS + 1;
    if (index >= hpack->count) return false;
    uint32_t at = (hpack->newest + MAX_TABLE_FIELDS - (uint32_t)index) % MAX_TABLE_FIELDS;
    const TableField *field = &hpack->fields[at];
    *name = (Text){field->bytes, field->name_length};
    *value = (Text){field->bytes + field->name_length, field->value_length};
    return true;
}

/* Adds a field to the table; one that does not fit empties it (section 4.4). */
static bool add_to_table(Hpack *hpack, Text name, Text value) {
    size_t size = name.length + value.length + FIELD_BYTES;
    if (size > hpack->max_bytes) {
        evict_to(hpack, 0);
        return true;
    }
    uint8_t *bytes = malloc(size); /* before the field whose name this is may be evicted */
    if (!bytes) return false;
    memcpy(bytes, name.bytes, name.length);
    if (value.length) memcpy(bytes + name.length, value.bytes, value.length);
    evict_to(hpack, hpack->max_bytes - size);
    hpack->newest = (hpack->newest + 1) % MAX_TABLE_FIELDS;
    hpack->fields[hpack->newest] = (TableField){bytes, name.length, value.length};
    hpack->count++;
    hpack->used_bytes += size;
    return true;
}

static bool read_literal(Hpack *hpack, Rest *rest, uint8_t prefix_max, Text *name, Text *value) {
    uint64_t index;
    if (!read_integer(rest, prefix_max, &index)) return false;
    if (index ? !read_indexed(hpack, index, name, value) : !read_text(rest, &hpack->name, name))
        return false;
    return read_text(rest, &hpack->value, value);
}

static bool read_table_sizes(Hpack *hpack, Rest *rest) {
    const uint8_t *start = rest->at;
    while (rest->at < rest->end && (*rest->at & 0xe0u) == SIZE_UPDATE) {
        uint64_t bytes;
        if (!read_integer(rest, 0x1f, &bytes) || bytes > hpack->allowed_bytes) return false;
        hpack->max_bytes = (size_t)bytes;
        evict_to(hpack, hpack->max_bytes);
    }
    bool owed_size = hpack->owes_size;
    hpack->owes_size = false;
    return !owed_size || rest->at > start;
}

/* Section 4.2: too many table sizes are refused before any of them is used. */
static bool has_many_sizes(Rest rest) {
    for (unsigned found = 0; rest.at < rest.end && (*rest.at & 0xe0u) == SIZE_UPDATE;) {
        if (++found > MAX_SIZE_UPDATES) return true;
        bool is_long = (*rest.at++ & 0x1fu) == 0x1fu;
        while (is_long && rest.at < rest.end) is_long = *rest.at++ & MORE;
    }
    return false;
}

HpackResult hpack_decode(Hpack *hpack, const uint8_t *block, size_t length, FieldTaker take,
                         void *taker) {
    Rest rest = {block, block + length};
    size_t list_bytes = 0;
    if (has_many_sizes(rest)) return HPACK_TOO_MANY_SIZES;
    if (!read_table_sizes(hpack, &rest)) return HPACK_MALFORMED;
    while (rest.at < rest.end) {
        uint8_t first = *rest.at;
        Text name, value;
        uint64_t index;
        bool is_added = !(first & INDEXED) && first & ADDED;
        if (first & INDEXED) {
            if (!read_integer(&rest, 0x7f, &index) || !read_indexed(hpack, index, &name, &value))
                return HPACK_MALFORMED;
        } else if (!is_added && first & SIZE_UPDATE) {
            return HPACK_MALFORMED; /* a size behind a field */
        } else if (!read_literal(hpack, &rest, is_added ? 0x3f : 0x0f, &name, &value)) {
            return HPACK_MALFORMED;
        }
        take(taker, name, value);
        list_bytes += name.length + value.length + FIELD_BYTES;
        if (is_added && !add_to_table(hpack, name, value)) return HPACK_MALFORMED;
        if (list_bytes > hpack->max_list_bytes) return HPACK_TOO_LARGE;
    }
    return HPACK_DONE;
}

static void encode_text(Buffer *block, const uint8_t *text, size_t length) {
    size_t left = length;
    if (left < 0x7f) {
        buffer_add_byte(block, (uint8_t)left);
    } else {
        buffer_add_byte(block, 0x7f);
        for (left -= 0x7f; left >= MORE; left >>= 7)
            buffer_add_byte(block, (uint8_t)(left & 0x7f) | MORE);
        buffer_add_byte(block, (uint8_t)left);
    }
    buffer_add(block, text, length);
}

void hpack_encode(Buffer *block, const char *name, const uint8_t *value, size_t value_length) {
    buffer_add_byte(block, 0);
    encode_text(block, (const uint8_t *)name, strlen(name));
    encode_text(block, value, value_length);
}
