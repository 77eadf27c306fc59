#!/bin/sh
echo example
