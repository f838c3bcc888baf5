/* The figures of workers in a message of another router: extproc/routing/told.py describes them. */
#include "figures.h"

#include "../../kvstate/native/reader.h"

/* Those of extproc.routing.told.WorkerNews: how many fields, and their most. */
enum { FIELDS = 6, MOST_REQUESTS = 1000000 };
static const uint64_t MOST_TOKENS = UINT64_C(1) << 50;

static void read_row(Reader *reader, Figures *row) {
    size_t fields = take_array(reader);
    if (fields < FIELDS) fail(reader);
    row->worker = take_count(reader, INT64_MAX);
    row->in_flight = (long long)take_count(reader, MOST_REQUESTS);
    row->booked_tokens = (long long)take_count(reader, MOST_TOKENS);
    row->sent_tokens = (long long)take_count(reader, MOST_TOKENS);
    take_count(reader, MOST_TOKENS); /* of the queue */
    take_count(reader, MOST_TOKENS); /* sent lately */
    for (size_t n = FIELDS; n < fields && !reader->failed; n++) skip(reader); /* of later versions */
}

ptrdiff_t figures_read(const void *bytes, size_t length, Figures *rows) {
    Reader reader = {bytes, (const unsigned char *)bytes + length, false};
    size_t count = take_array(&reader);
    if (count > MOST_FIGURES) return -1;
    for (size_t n = 0; n < count && !reader.failed; n++) read_row(&reader, &rows[n]);
    return reader.failed || reader.at != reader.end ? -1 : (ptrdiff_t)count;
}
